"""An objective over a packed batch, chunk by chunk, differentiable by the drafter's states."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from online.objectives.rows import Objective, Rows
from online.packing import PackedBlocks


class ObjectiveResult(NamedTuple):
    """Result of `objective_loss`; weighted sums over the rows.

    Attributes:
        loss: scalar with a gradient to ``hidden``.
        cross_entropy: of the labels.
        divergence: as the objective reports it.
        correct: of the rows whose argmax is the label.
        matches: bool ``[rows]``, which rows those are.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    correct: Tensor
    matches: Tensor


def objective_loss(
    objective: Objective,
    hidden: Tensor,
    blocks: PackedBlocks,
    total_weight: float,
    lm_head: Tensor,
    chunk_rows: int = 1024,
) -> ObjectiveResult:
    """Weighted mean of an objective's row losses over the batch that ``blocks`` is part of.

    Args:
        hidden: ``[rows, hidden]``, the drafter's final normed states at the counted positions.
        total_weight: sum of the weights of the whole batch.
        lm_head: ``[vocab, hidden]``, frozen; its dtype is that of the logits' matrix products.
        chunk_rows: rows whose logits exist at a time, but whole blocks.
    """
    return ObjectiveResult(
        *_Chunked.apply(hidden, objective, blocks, total_weight, lm_head, chunk_rows)
    )


class _Chunked(torch.autograd.Function):
    """Makes the gradient in the forward pass: the logits of a chunk exist once and are not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        objective: Objective,
        blocks: PackedBlocks,
        total_weight: float,
        lm_head: Tensor,
        chunk_rows: int,
    ) -> tuple[Tensor, ...]:
        sums = torch.zeros(4, device=hidden.device)
        gradient = torch.empty_like(hidden)
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for where, lengths in _chunks(blocks.lengths, chunk_rows):
            states = hidden[where]
            weights = blocks.weights[where, None] / total_weight
            rows = _rows(states, blocks, where, lengths, lm_head, total_weight)
            result = objective(rows)
            matches[where] = rows.is_right[:, 0]
            parts = (result.losses, -rows.label_log_probs, result.divergences, rows.is_right)
            sums += torch.stack([(part * weights).sum() for part in parts])
            slopes = result.slopes.mul_(weights).to(lm_head.dtype)
            gradient[where] = (slopes @ lm_head).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        loss, *others = sums.unbind()
        ctx.mark_non_differentiable(*others, matches)
        return loss, *others, matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0], *[None] * 5)


def _rows(
    states: Tensor,
    blocks: PackedBlocks,
    where: slice,
    lengths: Tensor,
    lm_head: Tensor,
    total_weight: float,
) -> Rows:
    logits = F.linear(states.to(lm_head.dtype), lm_head)
    lengths = lengths.to(states.device)
    index = torch.arange(len(lengths), device=states.device)
    of_row = index.repeat_interleave(lengths, output_size=len(states))
    starts = (lengths.cumsum(0) - lengths)[of_row]
    return Rows(
        log_probs=torch.log_softmax(logits, dim=-1, dtype=torch.float32),
        labels=blocks.labels[where, None],
        rejected=blocks.rejected[where, None],
        temperatures=blocks.temperatures[where, None],
        places=torch.arange(len(states), device=states.device) - starts,
        blocks=of_row,
        teacher=blocks.teacher.select(where),
        lm_head=lm_head,
        total_weight=total_weight,
    )


def _chunks(lengths: Tensor, most: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of consecutive whole blocks, at most so many unless one block has more.

    Args:
        lengths: int64 ``[blocks]``, rows of each block that has any, on the CPU.
    """
    first = start = rows = 0
    for index, length in enumerate(lengths.tolist()):
        if rows and rows + length > most:
            yield slice(start, start + rows), lengths[first:index]
            first, start, rows = index, start + rows, 0
        rows += length
    if rows:
        yield slice(start, start + rows), lengths[first:]
