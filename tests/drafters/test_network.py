"""The network against an independent reading of its definition, and who may see whom."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.drafters.blocks import block_token_ids
from adaspec.drafters.network import BlockDrafter
from tests.versions.tiny import TINY

LENGTH = 12
ANCHORS = [[3, 6, 6, 11], [1, 2, 9, 12]]
SIZE = TINY.block_size


@pytest.fixture(scope="module")
def drafter() -> BlockDrafter:
    torch.manual_seed(0)
    drafter = BlockDrafter(TINY)
    for parameter in drafter.parameters():
        # Wide enough that attention is far from uniform, norms far from one.
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.5)
    return drafter.double().requires_grad_(False)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Context features, anchors, noise."""
    torch.manual_seed(1)
    anchors = torch.tensor(ANCHORS)
    context = torch.randn(2, LENGTH, TINY.hidden_size, dtype=torch.float64)
    return context, anchors, torch.randn(2, 4, SIZE, TINY.hidden_size, dtype=torch.float64)


def reference(
    drafter: BlockDrafter, context: Tensor, anchor: int, noise: Tensor, dtype: torch.dtype
) -> Tensor:
    """One block of one sequence, head by head, with the names of the checkpoint only."""
    weights = {name: value.to(dtype) for name, value in drafter.state_dict().items()}
    group = TINY.num_attention_heads // TINY.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + TINY.rms_norm_eps).rsqrt()
        return x * scale * weights[f"{name}.weight"]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = TINY.head_dim // 2
        turned = torch.empty_like(x)
        for i in range(half):
            angle = position * TINY.rope_theta ** (-2 * i / TINY.head_dim)
            a, b = x[i], x[i + half]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"]).view(-1, count, TINY.head_dim)

    seen = context[:anchor].to(dtype)  # strictly before the anchor
    states = noise.to(dtype)
    for number in range(TINY.num_hidden_layers):
        layer = f"layers.{number}"
        attention = f"{layer}.self_attn"
        normed = norm(states, f"{layer}.input_layernorm")
        sources = torch.cat([seen, normed])  # the context is not normed
        keys = norm(heads(sources, f"{attention}.k_proj", TINY.num_key_value_heads),
                    f"{attention}.k_norm")  # fmt: skip
        values = heads(sources, f"{attention}.v_proj", TINY.num_key_value_heads)
        queries = norm(heads(normed, f"{attention}.q_proj", TINY.num_attention_heads),
                       f"{attention}.q_norm")  # fmt: skip
        mixed = torch.empty_like(queries)
        for head in range(TINY.num_attention_heads):
            kv = head // group
            key = torch.stack([rotate(k, position) for position, k in enumerate(keys[:, kv])])
            for row in range(SIZE):
                query = rotate(queries[row, head], anchor + row)
                weight = (key @ query / math.sqrt(TINY.head_dim)).softmax(0)
                mixed[row, head] = weight @ values[:, kv]
        states = states + F.linear(mixed.flatten(1), weights[f"{attention}.o_proj.weight"])
        normed = norm(states, f"{layer}.post_attention_layernorm")
        gate, up, down = (weights[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        states = states + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
    return norm(states, "norm")


def test_many_blocks_equal_the_definition(
    drafter: BlockDrafter, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    context, anchors, noise = inputs
    hidden = drafter.forward_blocks(context, anchors, noise)
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[row]):
            expected = reference(drafter, context[row], anchor, noise[row, block], torch.float64)
            # Norms, rotations and the softmax are float32 by design.
            torch.testing.assert_close(hidden[row, block], expected, rtol=1e-4, atol=1e-5)


def test_a_single_draft_equals_its_block_among_many(drafter: BlockDrafter) -> None:
    torch.manual_seed(2)
    taps = torch.randn(1, LENGTH, TINY.context_width, dtype=torch.float64)
    embedding, lm_head = torch.randn(2, TINY.vocab_size, TINY.hidden_size, dtype=torch.float64)
    anchors = torch.tensor([[1, 5, 12]])
    tokens = torch.tensor([[7, 0, 31]])
    noise = F.embedding(block_token_ids(tokens, SIZE, TINY.mask_token_id), embedding)
    hidden = drafter.forward_blocks(drafter.context_features(taps), anchors, noise)
    together = F.linear(hidden[0], lm_head)
    for block, anchor in enumerate(anchors[0].tolist()):
        alone = drafter.draft(taps[0, :anchor], int(tokens[0, block]), embedding, lm_head)
        assert alone.shape == (SIZE, TINY.vocab_size)
        torch.testing.assert_close(alone, together[block], rtol=1e-5, atol=1e-6)


def test_the_context_feature_is_the_norm_of_the_projected_taps(drafter: BlockDrafter) -> None:
    torch.manual_seed(3)
    taps = torch.randn(4, TINY.context_width, dtype=torch.float64)
    projected = taps @ drafter.fc.weight.T
    scale = (projected.square().mean(-1, keepdim=True) + TINY.rms_norm_eps).rsqrt()
    expected = projected * scale * drafter.hidden_norm.weight
    torch.testing.assert_close(drafter.context_features(taps), expected, rtol=1e-5, atol=1e-6)


def changed_blocks(before: Tensor, after: Tensor) -> Tensor:
    """bool [batch, blocks]: blocks in which every row moved; the others have not moved a bit."""
    moved = (before != after).any(-1)  # [batch, blocks, block]
    assert torch.equal(moved.any(-1), moved.all(-1))
    return moved.all(-1)


@pytest.mark.parametrize("position", range(LENGTH))
def test_a_block_sees_the_context_before_its_anchor_and_nothing_after(
    drafter: BlockDrafter, inputs: tuple[Tensor, Tensor, Tensor], position: int
) -> None:
    context, anchors, noise = inputs
    before = drafter.forward_blocks(context, anchors, noise)
    other = context.clone()
    other[:, position] += 1.0
    after = drafter.forward_blocks(other, anchors, noise)
    assert torch.equal(changed_blocks(before, after), anchors > position)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("row", range(SIZE))
def test_a_block_sees_all_of_itself_and_no_other_block(
    drafter: BlockDrafter, inputs: tuple[Tensor, Tensor, Tensor], block: int, row: int
) -> None:
    context, anchors, noise = inputs
    before = drafter.forward_blocks(context, anchors, noise)
    other = noise.clone()
    other[0, block, row] += 1.0
    after = drafter.forward_blocks(context, anchors, other)
    expected = torch.zeros(2, 4, dtype=torch.bool)
    expected[0, block] = True
    assert torch.equal(changed_blocks(before, after), expected)


def test_rows_a_block_must_not_see_may_hold_any_number(
    drafter: BlockDrafter, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    context, anchors, noise = inputs
    padding = torch.full((2, 5, TINY.hidden_size), 1e6, dtype=torch.float64)
    torch.testing.assert_close(
        drafter.forward_blocks(torch.cat([context, padding], dim=1), anchors, noise),
        drafter.forward_blocks(context, anchors, noise),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_block_at_the_very_start_sees_itself_only(drafter: BlockDrafter) -> None:
    torch.manual_seed(4)
    empty = torch.empty(0, TINY.context_width, dtype=torch.float64)
    embedding, lm_head = torch.randn(2, TINY.vocab_size, TINY.hidden_size, dtype=torch.float64)
    assert drafter.draft(empty, 3, embedding, lm_head).isfinite().all()
