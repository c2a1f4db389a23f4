"""The chunked loss against the plain formula in float64."""

import pytest
import torch
from torch import Tensor

from adaspec.drafters.loss import block_cross_entropy, length_head_loss, position_weights

VOCAB, HIDDEN = 23, 8


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 7, HIDDEN)
    return (
        hidden,
        torch.randint(0, VOCAB, hidden.shape[:-1]),
        torch.rand(hidden.shape[:-1]) < 0.6,
        torch.randn(VOCAB, HIDDEN),
    )


def plain_loss(
    hidden: Tensor, labels: Tensor, valid: Tensor, lm_head: Tensor, decay: float
) -> Tensor:
    """``sum w CE / sum w`` with ``w = valid exp(-(k - 1) / decay)``, all logits at once."""
    log_probs = (hidden @ lm_head.T).log_softmax(-1)
    entropy = -log_probs.gather(-1, labels[..., None]).squeeze(-1)
    steps = torch.arange(labels.shape[-1], dtype=torch.float64)
    weights = valid * torch.exp(-steps / decay)
    return (weights * entropy).sum() / weights.sum()


@pytest.mark.parametrize("chunk_rows", [1, 4, 10_000])
@pytest.mark.parametrize("decay", [2.0, 7.0])
def test_loss_and_gradient_equal_the_formula(chunk_rows: int, decay: float) -> None:
    hidden, labels, valid, lm_head = inputs()
    ours = hidden.clone().requires_grad_()
    loss, _ = block_cross_entropy(ours, labels, valid, lm_head, decay, chunk_rows)
    (3.0 * loss).backward()
    exact = hidden.double().requires_grad_()
    expected = plain_loss(exact, labels, valid, lm_head.double(), decay)
    (3.0 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_correct_positions_are_valid_ones_whose_argmax_is_the_label() -> None:
    hidden, labels, valid, lm_head = inputs()
    best = (hidden @ lm_head.T).argmax(-1)
    labels = torch.where(torch.rand(labels.shape) < 0.5, best, labels)
    _, correct = block_cross_entropy(hidden, labels, valid, lm_head, chunk_rows=6)
    assert torch.equal(correct, valid & (best == labels))
    assert correct.any()


def test_without_a_counted_position_the_loss_is_zero() -> None:
    hidden, labels, valid, lm_head = inputs()
    hidden.requires_grad_()
    loss, correct = block_cross_entropy(hidden, labels, torch.zeros_like(valid), lm_head)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.eq(0).all()
    assert not correct.any()


def test_what_is_not_valid_does_not_matter() -> None:
    hidden, labels, valid, lm_head = inputs()
    first = block_cross_entropy(hidden, labels, valid, lm_head).loss
    hidden[~valid] = 1e4
    assert torch.equal(block_cross_entropy(hidden, labels, valid, lm_head).loss, first)


def test_weights_start_at_one_and_fall_by_e_every_decay_positions() -> None:
    weights = position_weights(16, 7.0, "cpu")
    assert weights.shape == (15,)
    assert weights[0] == 1.0
    torch.testing.assert_close(weights[7:] / weights[:8], torch.full((8,), torch.e**-1.0))


def test_the_length_head_is_asked_for_one_draft_more_than_is_accepted() -> None:
    block = 4
    shares = torch.tensor([[0.5, 1.0, 0.25], [0.9, 0.0, 0.0]], requires_grad=True)
    accepted = torch.tensor([[0, 3, 2], [1, 3, 0]])
    kept = torch.tensor([[True, True, False], [True, False, False]])
    loss = length_head_loss(shares, accepted, kept, block)
    # Labels 1/4, 4/4 and 2/4; the others are not known.
    expected = ((0.5 - 0.25) ** 2 + 0.0 + (0.9 - 0.5) ** 2) / 3
    torch.testing.assert_close(loss.item(), expected, atol=1e-6, rtol=0)
    loss.backward()
    assert shares.grad is not None
    assert not shares.grad[~kept].any()
    assert length_head_loss(shares, accepted, torch.zeros_like(kept), block).item() == 0.0
