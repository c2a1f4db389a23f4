"""Batches of trajectories: order, padding, and what counts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaspec.training.trajectories import Trajectory

_SORT_WINDOW = 64  # batches that are length-sorted together
_LENGTH_MULTIPLE = 32


class Batch(NamedTuple):
    """Padded trajectories.

    Attributes:
        tokens: int64 ``[batch, length]``, padded with 0 on the right.
        loss_mask: bool ``[batch, length]``, tokens written by the target.
    """

    tokens: Tensor
    loss_mask: Tensor


def pad(trajectories: Sequence[Trajectory], device: torch.device) -> Batch:
    """Stack trajectories of different lengths."""
    longest = max(len(t.tokens) for t in trajectories)
    # A multiple keeps the number of distinct shapes, and so of allocator blocks, small.
    length = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    tokens = torch.zeros(len(trajectories), length, dtype=torch.long)
    mask = torch.zeros(len(trajectories), length, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        end = len(trajectory.tokens)
        tokens[row, :end] = torch.from_numpy(trajectory.tokens.astype(np.int64))
        mask[row, trajectory.prompt_length : end] = True
    return Batch(tokens.to(device, non_blocking=True), mask.to(device, non_blocking=True))


def pack(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Consecutive groups whose padded size is at most ``tokens_per_batch`` (or a single sequence).

    Args:
        lengths: in the order to be kept.

    Returns:
        Positions in ``lengths``.
    """
    groups: list[list[int]] = []
    widest = 0
    for index, length in enumerate(lengths):
        widest = max(widest, length)
        if groups and (len(groups[-1]) + 1) * widest <= tokens_per_batch:
            groups[-1].append(index)
        else:
            groups.append([index])
            widest = length
    return groups


def epoch_batches(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """A random order of batches, each of sequences of similar length.

    A function of its arguments alone, so that a resumed run sees the same order.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    mean = sum(lengths) / max(len(lengths), 1)
    window = max(1, round(_SORT_WINDOW * tokens_per_batch / max(mean, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window].tolist(), key=lambda i: lengths[i])
        groups = pack([lengths[i] for i in part], tokens_per_batch)
        batches.extend([part[position] for position in group] for group in groups)
    return [batches[i] for i in random.permutation(len(batches))]


def endless(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, skip: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Batches of epoch after epoch as ``(epoch, indices)``, the first ``skip`` left out."""
    epoch = 0
    while True:
        batches = epoch_batches(lengths, tokens_per_batch, seed, epoch)
        for batch in batches[skip:]:
            yield epoch, batch
        skip = max(0, skip - len(batches))
        epoch += 1
