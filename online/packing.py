"""Blocks on several trajectories as one padded batch, so that they share every matrix product."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adaspec.drafters.blocks import block_token_ids
from adaspec.drafters.config import DrafterConfig
from adaspec.feedback import HiddenTeacher, Teacher
from adaspec.feedback.record import concatenate_teachers
from online.batch import BlockBatch


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of several trajectories on the training device; ``rows`` are the counted positions.

    Attributes:
        taps: float32 ``[trajectories, context, taps * hidden]``, zeros behind the shorter ones.
        anchors: int64 ``[trajectories, blocks]``; 0 where a trajectory has fewer blocks.
        tokens: int64 ``[trajectories, blocks, block]``, ``[anchor, MASK, ...]``.
        is_random: bool ``[trajectories, blocks]``, blocks that the server did not draft.
        counted: bool ``[trajectories, blocks, block - 1]``, positions 1 .. of the rows below.
        labels: int64 ``[rows]``, the teacher's argmax.
        teacher: with as many rows.
        weights: float32 ``[rows]``, not normalised.
        rejected: int64 ``[rows]``, the draft that the target rejected there, or -1.
        temperatures: float32 ``[rows]``, of the rows' requests.
        lengths: int64, rows of each block that has any, in order. On the CPU.
    """

    taps: Tensor
    anchors: Tensor
    tokens: Tensor
    is_random: Tensor
    counted: Tensor
    labels: Tensor
    teacher: Teacher
    weights: Tensor
    rejected: Tensor
    temperatures: Tensor
    lengths: Tensor


def pack(
    parts: Sequence[BlockBatch], config: DrafterConfig, device: torch.device, capacity: int
) -> Iterator[PackedBlocks]:
    """Pack blocks into batches of at most ``capacity`` padded context rows (one trajectory at
    least); trajectories of like length, and with a teacher of one form, share a batch.
    """
    counting = [part for part in parts if part.tokens > 0]
    forms: dict[object, list[BlockBatch]] = {}
    for part in sorted(counting, key=_context_length):
        forms.setdefault(_form(part.trajectory.teacher), []).append(part)
    for same_form in forms.values():
        group: list[BlockBatch] = []
        for part in same_form:  # ascending: the next one is the longest so far
            if group and (len(group) + 1) * _context_length(part) > capacity:
                yield _pack_group(group, config, device)
                group = []
            group.append(part)
        yield _pack_group(group, config, device)


def _pack_group(
    parts: Sequence[BlockBatch], config: DrafterConfig, device: torch.device
) -> PackedBlocks:
    taps = [part.trajectory.taps[: _context_length(part)].to(torch.float32) for part in parts]
    anchor_tokens = [part.trajectory.tokens[part.anchors] for part in parts]
    weights = pad_sequence([part.weights for part in parts], batch_first=True)
    counted = weights > 0
    rows = [part.teacher_rows[part.weights > 0] for part in parts]
    chosen = list(zip(parts, rows, strict=True))
    lengths = counted.sum(-1).flatten()  # [trajectories * blocks]
    temperatures = [torch.full(r.shape, part.trajectory.temperature) for part, r in chosen]
    return PackedBlocks(
        taps=pad_sequence(taps, batch_first=True).to(device),
        anchors=pad_sequence([part.anchors for part in parts], batch_first=True).to(device),
        tokens=block_token_ids(
            pad_sequence(anchor_tokens, batch_first=True), config.block_size, config.mask_token_id
        ).to(device),
        is_random=pad_sequence([part.is_random for part in parts], batch_first=True).to(device),
        counted=counted.to(device),
        labels=torch.cat([part.trajectory.teacher_tokens[rows] for part, rows in chosen]).to(
            device
        ),
        teacher=concatenate_teachers(
            [part.trajectory.teacher.select(rows) for part, rows in chosen]
        ).to(device),
        weights=weights[counted].to(device),
        rejected=torch.cat([part.rejected[part.weights > 0] for part in parts]).to(device),
        temperatures=torch.cat(temperatures).to(device),
        lengths=lengths[lengths > 0],
    )


def _context_length(part: BlockBatch) -> int:
    """No block sees further than the last anchor."""
    return int(part.anchors[-1])


def _form(teacher: Teacher) -> object:
    """What must agree between teachers that are joined."""
    if isinstance(teacher, HiddenTeacher):
        return teacher.states.dtype
    return teacher.logits.dtype, teacher.logits.shape[1]
