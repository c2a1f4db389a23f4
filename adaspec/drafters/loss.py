"""The drafter's training loss: position-weighted cross-entropy on the teacher's argmax."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class BlockLoss(NamedTuple):
    """Result of `block_cross_entropy`.

    Attributes:
        loss: scalar, weighted mean over the counted positions.
        correct: bool ``[batch, blocks, block - 1]``, counted positions whose argmax is the label.
    """

    loss: Tensor
    correct: Tensor


def position_weights(block_size: int, decay: float, device: torch.device | str) -> Tensor:
    """DFlash's weights ``exp(-(k - 1) / decay)`` for block positions k = 1 .. block - 1, float32.

    An early mistake ends the accepted prefix, so early positions count more. DFlash uses decay 7 at
    block size 16.
    """
    return torch.exp(-torch.arange(block_size - 1, device=device, dtype=torch.float32) / decay)


def block_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    valid: Tensor,
    lm_head: Tensor,
    decay: float = 7.0,
    chunk_rows: int = 8192,
) -> BlockLoss:
    """Weighted mean cross-entropy of draft blocks.

    ``sum w * CE(z, y) / sum w`` with ``w`` the position weight on valid positions (AdaFlash's hard
    term; DFlash's loss). Logits exist for ``chunk_rows`` rows at a time only.

    Args:
        hidden: ``[batch, blocks, block - 1, hidden]``, final normed states without the anchor's.
        labels: int64 ``[batch, blocks, block - 1]``.
        valid: bool, same shape.
        lm_head: ``[vocab, hidden]``, frozen; its dtype is that of the logits' matrix product.
        decay: in block positions.
    """
    weights = position_weights(labels.shape[-1] + 1, decay, hidden.device).expand(labels.shape)
    counted = valid.flatten().nonzero().squeeze(-1)
    row_weights = weights.flatten()[counted]
    row_weights = row_weights / row_weights.sum().clamp(min=1e-6)
    loss, matches = _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2).index_select(0, counted),
        lm_head,
        labels.flatten()[counted],
        row_weights,
        chunk_rows,
    )
    correct = torch.zeros_like(valid).flatten()
    correct[counted] = matches
    return BlockLoss(loss, correct.view_as(valid))


def length_head_loss(shares: Tensor, accepted: Tensor, kept: Tensor, block_size: int) -> Tensor:
    """AdaFlash's loss of the length head: scalar, squared error over the kept blocks.

    The label of a block is ``min(A + 1, block) / block`` with A its accepted drafts: the head looks
    one draft ahead.

    Args:
        shares: ``[...]``, the head's output (`LengthHead`).
        accepted: int64, same shape.
        kept: bool, same shape; blocks of which A is known.
    """
    label = (accepted + 1).clamp(max=block_size).float() / block_size
    error = (shares.float() - label).square() * kept
    return error.sum() / kept.sum().clamp(min=1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum of cross-entropies, with the gradient made in the forward pass.

    Making it there means that the logits of a chunk are computed once and never stored; the output
    matrix is frozen and gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        matches = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            label, weight = labels[rows, None], weights[rows, None]
            logits = F.linear(hidden[rows].to(lm_head.dtype), lm_head)  # [rows, vocab]
            matches[rows] = logits.argmax(-1) == label[:, 0]
            log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            loss -= (log_probs.gather(1, label) * weight).sum()
            slope = log_probs.exp_().scatter_add_(1, label, -torch.ones_like(weight))
            gradient[rows] = (slope.mul_(weight).to(lm_head.dtype) @ lm_head).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(matches)
        return loss, matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None
