"""Draft blocks on trajectories: which anchors an optimiser step learns from, and their labels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaspec.acceptance import prefix_length
from adaspec.drafters.loss import position_weights
from online.config import BatchSection
from online.trajectory import Trajectory


@dataclass(frozen=True)
class BlockBatch:
    """Blocks on one trajectory.

    Attributes:
        trajectory: where they lie.
        anchors: int64 ``[blocks]``, ascending.
        teacher_rows: int64 ``[blocks, block - 1]``, index into the trajectory's teacher of the row
            that judges block position k = 1 ..; 0 where not valid.
        weights: float32, same shape: position weight, 0 where not valid; not normalised.
        is_random: bool ``[blocks]``, blocks that the server did not draft.
        rejected: int64, as ``teacher_rows``: the draft that the target rejected there, or -1.
    """

    trajectory: Trajectory
    anchors: Tensor
    teacher_rows: Tensor
    weights: Tensor
    is_random: Tensor
    rejected: Tensor

    @property
    def tokens(self) -> int:
        """Positions that count."""
        return int((self.weights > 0).sum())


def sample_blocks(
    trajectory: Trajectory,
    config: BatchSection,
    block_size: int,
    decay: float,
    rng: np.random.Generator,
) -> BlockBatch:
    """Draw really drafted blocks and random anchors, each without replacement.

    A really drafted block counts up to its first rejection, where the target's word is about the
    very tokens that the drafter proposed. Behind a random anchor, as behind a rejection under
    ``real_labels = "trajectory"``, a position counts while all earlier tokens of the block are the
    teacher's own choice: the drafter cannot know a sampled deviation.
    """
    rows = min(trajectory.rows, config.max_context)
    first = trajectory.prompt_length
    real = [block for block in trajectory.blocks if block.anchor < rows]
    real_count = min(round(config.blocks * config.real_share), len(real))
    picked = [real[i] for i in rng.choice(len(real), size=real_count, replace=False)]
    candidates = np.arange(first, rows)
    random_count = min(config.blocks - real_count, len(candidates))
    random = rng.choice(candidates, size=random_count, replace=False).tolist()

    # Drafts judged in their right context; none of a random anchor were.
    verified = [block.accepted + 1 for block in picked] + [0] * random_count
    refused = [block.rejected for block in picked] + [-1] * random_count
    anchors = torch.tensor([block.anchor for block in picked] + random)
    order = anchors.argsort(stable=True)
    anchors, judged = anchors[order], torch.tensor(verified)[order]

    offsets = torch.arange(1, block_size)
    positions = anchors[:, None] + offsets - 1  # position whose teacher row judges offset k
    inside = positions < rows
    teacher_rows = torch.where(inside, positions - first, 0)
    follows = trajectory.tokens[(positions + 1).clamp(max=len(trajectory.tokens) - 1)]
    follows = follows == trajectory.teacher_tokens[teacher_rows]
    on_path = offsets <= prefix_length(follows)[:, None] + 1
    right = offsets <= judged[:, None]
    if config.real_labels == "verified":
        valid = torch.where(judged[:, None] > 0, right, on_path)
    else:
        valid = right | on_path
    valid &= inside & _kept(len(anchors), block_size, config, rng)
    weights = position_weights(block_size, decay, "cpu") * valid
    rejected = torch.where(offsets == judged[:, None], torch.tensor(refused)[order, None], -1)
    return BlockBatch(trajectory, anchors, teacher_rows, weights, judged == 0, rejected)


def _kept(blocks: int, block_size: int, config: BatchSection, rng: np.random.Generator) -> Tensor:
    """Positions that PARD's conditional drop keeps, the first ones of each block: bool ``[blocks,
    block - 1]``.
    """
    if config.conditional_drop == 1:
        return torch.ones(blocks, block_size - 1, dtype=torch.bool)
    chances = config.conditional_drop ** np.arange(block_size - 1)
    return torch.from_numpy(rng.random((blocks, 1)) < np.maximum(chances, config.least_kept))
