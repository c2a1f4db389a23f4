"""Held-out acceptance: greedy speculative decoding, simulated on known trajectories."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.acceptance import prefix_length, walk_acceptance
from adaspec.drafters.blocks import block_position_ids, block_token_ids
from adaspec.drafters.network import BlockDrafter
from adaspec.training.batches import pack, pad
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory


@dataclass(frozen=True)
class AcceptanceReport:
    """Simulated greedy decoding of held-out responses.

    Attributes:
        committed_per_pass: tokens committed by an average target pass.
        survival: share of blocks whose first k drafts are all accepted, k = 1 .. block - 1, over
            all anchors.
        responses: how many responses were walked.
        passes: target passes of the walks.
    """

    committed_per_pass: float
    survival: tuple[float, ...]
    responses: int
    passes: int


@torch.inference_mode()
def simulate(
    drafter: BlockDrafter,
    target: TargetModel,
    trajectories: Sequence[Trajectory],
    tokens_per_batch: int = 8192,
    blocks_at_once: int = 2048,
) -> AcceptanceReport:
    """Walk greedy trajectories as a server would: draft, keep the matching prefix, add one token.

    A block is drafted at every token of every response, in parallel; the walk then only looks its
    accepted lengths up.

    Args:
        trajectories: written greedily by this target.
        blocks_at_once: draft blocks in one forward pass.
    """
    drafts = drafter.config.block_size - 1
    committed = passes = anchors_seen = 0
    survival = torch.zeros(drafts, device=target.device)
    usable = sorted((t for t in trajectories if t.response_length > 1), key=lambda t: len(t.tokens))
    for group in pack([len(t.tokens) for t in usable], tokens_per_batch):
        part = [usable[i] for i in group]
        accepted = _accepted_everywhere(drafter, target, part, blocks_at_once)
        for row, trajectory in enumerate(part):
            lengths = accepted[row, trajectory.prompt_length : len(trajectory.tokens) - 1]
            done, taken = walk_acceptance(lengths, trajectory.response_length)
            committed += done
            passes += taken
            anchors_seen += lengths.numel()
            steps = torch.arange(1, drafts + 1, device=lengths.device)
            survival += (lengths[:, None] >= steps).sum(0)
    shares = (survival / max(anchors_seen, 1)).tolist()
    return AcceptanceReport(committed / max(passes, 1), tuple(shares), len(usable), passes)


def _accepted_everywhere(
    drafter: BlockDrafter,
    target: TargetModel,
    trajectories: Sequence[Trajectory],
    blocks_at_once: int,
) -> Tensor:
    """Accepted drafts for an anchor at every position: int64 ``[batch, length]``."""
    config = drafter.config
    batch = pad(trajectories, target.device)
    taps, _ = target.read(batch.tokens, config.target_layer_ids)
    autocast = torch.autocast(
        target.device.type, torch.bfloat16, enabled=target.embedding.dtype == torch.bfloat16
    )
    with autocast:
        context = drafter.context_features(taps)
        rows, length = batch.tokens.shape
        accepted = torch.zeros_like(batch.tokens)
        step = max(1, blocks_at_once // rows)
        for start in range(0, length, step):
            anchors = torch.arange(start, min(start + step, length), device=target.device)
            anchors = anchors.expand(rows, -1)
            blocks = block_token_ids(
                batch.tokens.gather(1, anchors), config.block_size, config.mask_token_id
            )
            noise = F.embedding(blocks, target.embedding)
            hidden = drafter.forward_blocks(context, anchors, noise)[..., 1:, :]
            drafted = F.linear(hidden.to(target.lm_head.dtype), target.lm_head).argmax(-1)
            positions = block_position_ids(anchors, config.block_size)[..., 1:]
            inside = positions.clamp(max=length - 1).flatten(1)
            wanted = batch.tokens.gather(1, inside).view_as(positions)
            written = batch.loss_mask.gather(1, inside).view_as(positions) & (positions < length)
            accepted[:, start : start + anchors.shape[1]] = prefix_length(
                (drafted == wanted) & written
            )
    return accepted
