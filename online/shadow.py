"""Replayed acceptance: speculative decoding simulated on trajectories that already exist.

A draft is accepted while it equals the trajectory. On greedy requests this is what the server
would do. On sampled ones the trajectory's token is a sample of the target, so that it equals a
draft d with probability q(d), the acceptance probability of target-only sampling: the estimate is
unbiased.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.drafters.blocks import block_token_ids
from adaspec.drafters.network import BlockDrafter
from adaspec.feedback.sampling import request_score
from online.target import TargetMatrices
from online.trajectory import Trajectory

_BATCH = 16


class Walk(NamedTuple):
    """A simulated stretch of decoding.

    Attributes:
        committed: tokens committed.
        passes: target passes it took.
    """

    committed: int
    passes: int


@torch.no_grad()
def walk(
    drafter: BlockDrafter,
    target: TargetMatrices,
    trajectories: Sequence[Trajectory],
    passes: int,
    max_context: int,
) -> list[Walk]:
    """Decode a stretch of each trajectory with a drafter.

    The stretch starts at a place chosen by the request's id, so that every drafter is given the
    same one, and ends after ``passes`` target passes or with the trajectory.

    Args:
        drafter: in a type that its device computes in.
        max_context: trajectories are cut to this many tokens.
    """
    # Trajectories of like length share a batch, which is padded to the longest.
    order = sorted(range(len(trajectories)), key=lambda i: trajectories[i].rows)
    walks = [Walk(0, 0)] * len(trajectories)
    for start in range(0, len(order), _BATCH):
        chosen = order[start : start + _BATCH]
        batch = [trajectories[i] for i in chosen]
        for index, result in zip(
            chosen, _walk_batch(drafter, target, batch, passes, max_context), strict=True
        ):
            walks[index] = result
    return walks


def _walk_batch(
    drafter: BlockDrafter,
    target: TargetMatrices,
    batch: Sequence[Trajectory],
    passes: int,
    max_context: int,
) -> list[Walk]:
    device, dtype = target.embedding.device, drafter.fc.weight.dtype
    ends = [min(len(t.tokens), t.rows + 1, max_context) for t in batch]
    positions = [_start(t, end, passes) for t, end in zip(batch, ends, strict=True)]
    starts = list(positions)
    # Nothing is drafted behind the last pass of full blocks.
    reach = [
        min(end, position + passes * drafter.config.block_size, t.rows)
        for t, end, position in zip(batch, ends, positions, strict=True)
    ]
    context = torch.stack(
        [
            F.pad(
                drafter.context_features(t.taps[:rows].to(device, dtype)),
                (0, 0, 0, max(reach) - rows),
            )
            for t, rows in zip(batch, reach, strict=True)
        ]
    )
    taken = [0] * len(batch)
    for _ in range(passes):
        # The anchor's successor must be known, or nothing can be accepted or rejected.
        active = [i for i, end in enumerate(ends) if positions[i] < end - 1]
        if not active:
            break
        tokens = [batch[i].tokens[positions[i] : ends[i]] for i in active]
        anchors = torch.tensor([positions[i] for i in active])
        accepted = _accepted(drafter, target, context[active], anchors, tokens)
        for i, count in zip(active, accepted, strict=True):
            positions[i] += count + 1
            taken[i] += 1
    return [
        Walk(position - start, count)
        for position, start, count in zip(positions, starts, taken, strict=True)
    ]


def _start(trajectory: Trajectory, end: int, passes: int) -> int:
    """First anchor: anywhere in the response that leaves ``passes`` tokens behind it."""
    slack = max(0, end - 1 - passes - trajectory.prompt_length)
    score = request_score(trajectory.request, "stretch")
    return trajectory.prompt_length + int(score * (slack + 1))


def _accepted(
    drafter: BlockDrafter,
    target: TargetMatrices,
    context: Tensor,
    anchors: Tensor,
    tokens: Sequence[Tensor],
) -> list[int]:
    """Drafts accepted in one pass of every request; at most what its trajectory can confirm.

    The bonus token is one of the trajectory, too, hence the end at its last but one token.

    Args:
        context: ``[requests, context, hidden]``.
        anchors: int64 ``[requests]``.
        tokens: for each request, the trajectory from its anchor.
    """
    config, device = drafter.config, context.device
    first = torch.stack([rest[0] for rest in tokens])
    block = block_token_ids(first[:, None], config.block_size, config.mask_token_id).to(device)
    noise = F.embedding(block, target.embedding).to(context.dtype)
    hidden = drafter.forward_blocks(context, anchors[:, None].to(device), noise)[:, 0]
    accepted = [0] * len(tokens)
    alive = list(range(len(tokens)))
    for offset in range(1, config.block_size):
        # Only positions whose predecessors were all accepted need logits.
        alive = [i for i in alive if offset < len(tokens[i]) - 1]
        if not alive:
            break
        logits = F.linear(hidden[alive, offset].to(target.lm_head.dtype), target.lm_head)
        drafts = logits.argmax(-1).tolist()
        alive = [
            i for i, draft in zip(alive, drafts, strict=True) if draft == int(tokens[i][offset])
        ]
        for i in alive:
            accepted[i] = offset
    return accepted
