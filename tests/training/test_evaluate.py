"""Simulated acceptance against speculative decoding done step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adaspec.drafters.network import BlockDrafter
from adaspec.training.evaluate import simulate
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory
from tests.training.conftest import Training


def accepted_at(
    drafter: BlockDrafter, target: TargetModel, trajectory: Trajectory, anchor: int
) -> int:
    """Accepted drafts of one block, drafted from the tokens before its anchor only."""
    tokens = torch.from_numpy(trajectory.tokens.astype("int64"))
    taps, _ = target.read(tokens[None, :anchor], drafter.config.target_layer_ids)
    logits = drafter.draft(taps[0], int(tokens[anchor]), target.embedding, target.lm_head)
    following = tokens[anchor + 1 :].tolist()
    count = 0
    for draft in logits[1:].argmax(-1).tolist():
        if count == len(following) or draft != following[count]:
            break
        count += 1
    return count


@pytest.mark.parametrize("tokens_per_batch", [1, 300, 10_000])
def test_the_simulation_equals_a_walk_with_single_drafts(
    trained: Training,
    target: TargetModel,
    trajectories: list[Trajectory],
    tokens_per_batch: int,
) -> None:
    drafter = trained.trainer.drafter
    sample = trajectories[:5]
    committed = passes = 0
    everywhere: list[int] = []
    for trajectory in sample:
        end = len(trajectory.tokens) - 1
        lengths = {
            anchor: accepted_at(drafter, target, trajectory, anchor)
            for anchor in range(trajectory.prompt_length, end)
        }
        everywhere += lengths.values()
        anchor = trajectory.prompt_length
        while anchor < end:
            step = lengths[anchor] + 1
            anchor += step
            passes += 1
        committed += end - trajectory.prompt_length
    report = simulate(drafter, target, sample, tokens_per_batch, blocks_at_once=32)
    assert (report.responses, report.passes) == (5, passes)
    assert report.committed_per_pass == committed / passes > 1.5
    for k, share in enumerate(report.survival, start=1):
        expected = sum(count >= k for count in everywhere) / len(everywhere)
        assert share == pytest.approx(expected, abs=1e-6)


def test_drafts_beyond_the_end_of_a_response_do_not_count(
    trained: Training, target: TargetModel
) -> None:
    # Without an output matrix every draft is token 0, which padding holds too.
    blank = replace(target, lm_head=torch.zeros_like(target.lm_head))
    response = Trajectory(np.array([5, 6, 0, 0, 0, 0, 0], np.int32), 2, 0)
    report = simulate(trained.trainer.drafter, blank, [response])
    assert (report.committed_per_pass, report.passes) == (4.0, 1)
    assert report.survival == (1.0, 0.75, 0.5)  # 4, 3, 2 and 1 tokens follow the four anchors


def test_responses_of_one_token_need_no_pass(
    trained: Training, target: TargetModel, trajectories: list[Trajectory]
) -> None:
    first = trajectories[0]
    short = Trajectory(first.tokens[: first.prompt_length + 1], first.prompt_length, 0)
    report = simulate(trained.trainer.drafter, target, [short])
    assert (report.responses, report.passes) == (0, 0)
