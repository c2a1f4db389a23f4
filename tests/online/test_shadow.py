import torch
from torch.nn import functional as F

from adaspec.acceptance import prefix_length
from adaspec.drafters.network import BlockDrafter
from adaspec.feedback.sampling import request_score
from online.evaluator import Evaluator
from online.shadow import Walk, walk
from online.target import TargetMatrices
from online.trajectory import Trajectory
from tests.online.world import DRAFTER


def one_by_one(
    drafter: BlockDrafter, target: TargetMatrices, trajectory: Trajectory, passes: int
) -> Walk:
    """Plain sequential simulation with single drafts."""
    last = len(trajectory.tokens) - 1
    slack = max(0, last - passes - trajectory.prompt_length)
    position = start = trajectory.prompt_length + int(
        request_score(trajectory.request, "stretch") * (slack + 1)
    )
    taken = 0
    while taken < passes and position < last:
        logits = drafter.draft(
            trajectory.taps[:position],
            int(trajectory.tokens[position]),
            target.embedding,
            target.lm_head,
        )
        drafts = logits[1:].argmax(-1)
        following = trajectory.tokens[position + 1 : position + 1 + len(drafts)]
        accepted = int(prefix_length((drafts[: len(following)] == following)[None])[0])
        position += min(accepted, last - position - 1) + 1
        taken += 1
    return Walk(position - start, taken)


def overfitted(drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list) -> BlockDrafter:
    """A drafter that accepts something, so that walks differ."""
    optimiser = torch.optim.Adam(drafter.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        for t in trajectories:
            anchors = torch.arange(t.prompt_length, t.rows - DRAFTER.block_size)
            block = torch.full((len(anchors), DRAFTER.block_size), DRAFTER.mask_token_id)
            block[:, 0] = t.tokens[anchors]
            noise = F.embedding(block, matrices.embedding)
            hidden = drafter.forward_blocks(
                drafter.context_features(t.taps)[None], anchors[None], noise[None]
            )[0]
            labels = t.tokens[anchors[:, None] + torch.arange(1, DRAFTER.block_size)]
            logits = hidden[:, 1:] @ matrices.lm_head.T
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
    return drafter.requires_grad_(False)


def test_batched_walks_equal_decoding_one_request_at_a_time(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    drafter = overfitted(drafter, matrices, trajectories[:4])
    cut = trajectories[5]
    short = Trajectory(
        "short",
        cut.tokens[:14],
        cut.taps[:14],
        cut.prompt_length,
        cut.teacher.select(slice(0, 8)),
        cut.teacher_tokens[:8],
        (),
        0.0,
    )
    everything = [*trajectories, short]
    for passes in (1, 4, 100):
        results = walk(drafter, matrices, everything, passes, max_context=4096)
        expected = [one_by_one(drafter, matrices, t, passes) for t in everything]
        assert results == expected
    assert max(w.committed / w.passes for w in results) > 2  # the test sees acceptance


def test_walks_end_with_the_trajectory(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    results = walk(drafter, matrices, trajectories, 1000, max_context=4096)
    for result, trajectory in zip(results, trajectories, strict=True):
        assert result.committed == len(trajectory.tokens) - 1 - trajectory.prompt_length


def test_known_versions_are_not_replayed(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    evaluator = Evaluator(DRAFTER, matrices, passes=4, max_context=4096)
    weights = {name: p.detach() for name, p in drafter.named_parameters()}
    first = evaluator.version(0, weights, trajectories)
    assert first == evaluator.candidate(weights, trajectories)
    broken = {name: torch.full_like(p, float("nan")) for name, p in weights.items()}
    assert evaluator.version(0, broken, trajectories) == first  # from memory
    evaluator.forget([], trajectories)
    assert evaluator.version(0, weights, trajectories[:2]) == first[:2]
