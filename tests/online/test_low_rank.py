import pytest
import torch

from adaspec.drafters.network import BlockDrafter
from online import low_rank
from tests.online.world import DRAFTER


@pytest.fixture
def attached(drafter: BlockDrafter) -> tuple[BlockDrafter, list[str], dict[str, torch.Tensor]]:
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    names = [name for name, p in drafter.named_parameters() if p.dim() == 2]
    return drafter, low_rank.attach(drafter, names, rank=3), before


Attached = tuple[BlockDrafter, list[str], dict[str, torch.Tensor]]


def test_a_new_delta_changes_nothing(attached: Attached) -> None:
    drafter, _, before = attached
    for name, weight in before.items():
        assert torch.equal(low_rank.effective(drafter, name), weight)
        assert torch.equal(low_rank.original(drafter, name), weight)


def test_only_deltas_can_be_trained_and_are_of_the_rank(attached: Attached) -> None:
    drafter, made, before = attached
    parameters = dict(drafter.named_parameters())
    matrices = [name for name, weight in before.items() if weight.dim() == 2]
    assert len(made) == 2 * len(matrices)
    originals = [p for name, p in parameters.items() if name.endswith(".original")]
    assert not any(p.requires_grad for p in originals)
    for name in made:
        if name.endswith("outer"):
            torch.nn.init.normal_(parameters[name])
    for name in matrices:
        moved = low_rank.effective(drafter, name) - before[name]
        assert int(torch.linalg.matrix_rank(moved)) == 3
        assert torch.equal(low_rank.original(drafter, name), before[name])


def test_cleared_deltas_are_gone(attached: Attached) -> None:
    drafter, made, before = attached
    parameters = dict(drafter.named_parameters())
    for name in made:
        torch.nn.init.normal_(parameters[name])
    low_rank.clear(drafter)
    assert all(torch.equal(low_rank.effective(drafter, name), w) for name, w in before.items())


def test_forward_passes_use_the_delta(attached: Attached) -> None:
    drafter, made, _ = attached
    context = torch.randn(1, 4, DRAFTER.hidden_size)
    anchors = torch.tensor([[4]])
    noise = torch.randn(1, 1, DRAFTER.block_size, DRAFTER.hidden_size)
    first = drafter.forward_blocks(context, anchors, noise)
    (outer,) = [name for name in made if name.startswith("layers.0.mlp.up") and "outer" in name]
    torch.nn.init.normal_(dict(drafter.named_parameters())[outer])
    assert not torch.allclose(drafter.forward_blocks(context, anchors, noise), first)
