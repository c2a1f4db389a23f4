"""Draft blocks on a trajectory: anchors, layout, positions, visibility and labels."""

from typing import NamedTuple

import torch
from torch import Tensor


def block_token_ids(anchor_tokens: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input blocks ``[anchor, MASK, ..., MASK]``.

    Args:
        anchor_tokens: int64 ``[...]``.

    Returns:
        int64 ``[..., block]``.
    """
    tokens = anchor_tokens.new_full((*anchor_tokens.shape, block_size), mask_token_id)
    tokens[..., 0] = anchor_tokens
    return tokens


def block_position_ids(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions ``anchor + k`` of a block's tokens: int64 ``[..., block]``."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def sample_anchors(
    loss_mask: Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw anchors uniformly without replacement, in each sequence on its own.

    An anchor is a position of the loss mask whose next position is in it too, so that its block
    holds at least one label. (AdaFlash draws from positions up to ``length - block`` only and
    never learns the end of a response; masking the labels keeps those blocks.)

    Args:
        loss_mask: bool ``[batch, length]``, tokens written by the target.
        count: anchors a sequence.

    Returns:
        ``(anchors, kept)``: int64 and bool ``[batch, count]``, anchors ascending; where a sequence
        has fewer than ``count`` candidates the rest is not kept.
    """
    candidate = torch.zeros_like(loss_mask)
    candidate[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    count = min(count, loss_mask.shape[1])
    order = torch.rand(loss_mask.shape, generator=generator, device=loss_mask.device)
    order = order.masked_fill(~candidate, -1.0)
    score, anchors = order.topk(count, dim=1)
    # Positions that are not kept sort last and point at position 0, which is always valid to read.
    anchors = anchors.masked_fill(score < 0, loss_mask.shape[1]).sort(dim=1).values
    kept = anchors < loss_mask.shape[1]
    return anchors.masked_fill(~kept, 0), kept


class BlockLabels(NamedTuple):
    """Labels of draft blocks.

    Attributes:
        tokens: int64 ``[batch, blocks, block - 1]``, the teacher's token at ``anchor + k``, k >= 1.
        valid: bool, same shape: positions that count.
    """

    tokens: Tensor
    valid: Tensor


def block_labels(
    anchors: Tensor,
    kept: Tensor,
    tokens: Tensor,
    teacher_tokens: Tensor,
    loss_mask: Tensor,
    block_size: int,
) -> BlockLabels:
    """Labels and their validity.

    A position counts while every earlier token of the block is the teacher's own choice: after a
    sampled deviation the drafter, which sees none of the block, is asked for a continuation it has
    no way to know. On greedy trajectories nothing is dropped.

    Args:
        anchors: int64 ``[batch, blocks]``.
        kept: bool ``[batch, blocks]``.
        tokens: int64 ``[batch, length]``, the trajectory.
        teacher_tokens: int64 ``[batch, length]``; entry ``j`` is the teacher's argmax for position
            ``j`` given the trajectory before it.
        loss_mask: bool ``[batch, length]``.
    """
    length = tokens.shape[1]
    positions = block_position_ids(anchors, block_size)[..., 1:]
    inside = positions < length
    flat = positions.clamp(max=length - 1).flatten(1)  # [batch, blocks * (block - 1)]

    def read(source: Tensor) -> Tensor:
        return source.gather(1, flat).view_as(positions)

    labels = read(teacher_tokens)
    follows = (read(tokens) == labels).long()
    on_path = torch.cat([torch.ones_like(follows[..., :1]), follows[..., :-1]], -1).cumprod(-1)
    valid = inside & read(loss_mask) & (on_path > 0) & kept[..., None]
    return BlockLabels(labels, valid)
