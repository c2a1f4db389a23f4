import numpy as np
import pytest
import torch

from adaspec.feedback import HiddenTeacher
from online.batch import sample_blocks
from online.config import BatchSection
from online.trajectory import DraftedBlock, Trajectory

BLOCK, PROMPT, ROWS = 5, 3, 14


def trajectory(deviations: tuple[int, ...] = ()) -> Trajectory:
    """Tokens 0 .. 14; the teacher agrees except about the tokens at ``deviations``."""
    tokens = torch.arange(ROWS + 1)
    teacher_tokens = tokens[PROMPT + 1 : ROWS + 1].clone()
    for position in deviations:
        teacher_tokens[position - PROMPT - 1] = 40
    return Trajectory(
        "r",
        tokens,
        torch.zeros(ROWS, 4),
        PROMPT,
        HiddenTeacher(torch.zeros(ROWS - PROMPT, 2)),
        teacher_tokens,
        (
            DraftedBlock(3, 1, BLOCK, 0, rejected=41),
            DraftedBlock(5, 4, BLOCK, 0),
            DraftedBlock(10, 0, 3, 0, rejected=42),
        ),
        0.0,
    )


def valid_offsets(config: BatchSection, source: Trajectory) -> dict[int, list[int]]:
    batch = sample_blocks(source, config, BLOCK, 7.0, np.random.default_rng(0))
    return {
        int(anchor): [k + 1 for k, weight in enumerate(row.tolist()) if weight > 0]
        for anchor, row in zip(batch.anchors, batch.weights, strict=True)
    }


def test_really_drafted_blocks_count_up_to_the_first_rejection() -> None:
    config = BatchSection(blocks=3, real_share=1.0)
    assert valid_offsets(config, trajectory()) == {3: [1, 2], 5: [1, 2, 3, 4], 10: [1]}


def test_the_continuation_can_label_what_follows_a_rejection() -> None:
    config = BatchSection(blocks=3, real_share=1.0, real_labels="trajectory")
    assert valid_offsets(config, trajectory()) == {
        3: [1, 2, 3, 4],
        5: [1, 2, 3, 4],
        10: [1, 2, 3, 4],
    }


def test_random_anchors_cover_the_response_and_stop_at_its_end() -> None:
    config = BatchSection(blocks=100, real_share=0.0)
    expected = {a: list(range(1, min(BLOCK, ROWS - a + 1))) for a in range(PROMPT, ROWS)}
    assert valid_offsets(config, trajectory()) == expected


def test_a_sampled_deviation_ends_a_random_block() -> None:
    config = BatchSection(blocks=100, real_share=0.0)
    offsets = valid_offsets(config, trajectory(deviations=(8,)))
    assert offsets[6] == [1, 2]  # the token at 8 is still judged, those behind it are not
    assert offsets[7] == [1]
    assert offsets[8] == [1, 2, 3, 4]


def test_a_sampled_deviation_does_not_end_a_block_whose_own_draft_it_was() -> None:
    config = BatchSection(blocks=3, real_share=1.0)
    assert valid_offsets(config, trajectory(deviations=(7,)))[5] == [1, 2, 3, 4]


def test_teacher_rows_judge_the_position_before_the_label() -> None:
    source = trajectory()
    batch = sample_blocks(source, BatchSection(blocks=9), BLOCK, 7.0, np.random.default_rng(1))
    counted = batch.weights > 0
    labels = source.teacher_tokens[batch.teacher_rows]
    positions = batch.anchors[:, None] + torch.arange(1, BLOCK)
    assert torch.equal(labels[counted], source.tokens[positions.clamp(max=ROWS)][counted])
    assert batch.tokens == int(counted.sum())


def test_earlier_positions_weigh_more() -> None:
    batch = sample_blocks(
        trajectory(), BatchSection(blocks=100, real_share=0.0), BLOCK, 7.0, np.random.default_rng(0)
    )
    expected = torch.exp(-torch.arange(BLOCK - 1) / 7.0)
    torch.testing.assert_close(batch.weights[0], expected)


def test_the_mix_keeps_its_share() -> None:
    config = BatchSection(blocks=4, real_share=0.5)
    batch = sample_blocks(trajectory(), config, BLOCK, 7.0, np.random.default_rng(0))
    assert len(batch.anchors) == 4
    assert batch.anchors.tolist() == sorted(batch.anchors.tolist())


@pytest.mark.parametrize("limit", [5, 9])
def test_long_trajectories_are_cut(limit: int) -> None:
    config = BatchSection(blocks=50, max_context=limit)
    batch = sample_blocks(trajectory(), config, BLOCK, 7.0, np.random.default_rng(0))
    assert int(batch.anchors.max()) < limit
    assert int(batch.teacher_rows.max()) < limit - PROMPT


def test_the_rejected_draft_stands_where_it_was_rejected() -> None:
    config = BatchSection(blocks=6, real_share=0.5)
    batch = sample_blocks(trajectory(), config, BLOCK, 7.0, np.random.default_rng(0))
    real = {int(a): row.tolist() for a, row in zip(batch.anchors[~batch.is_random],
            batch.rejected[~batch.is_random], strict=True)}  # fmt: skip
    assert real == {3: [-1, 41, -1, -1], 5: [-1] * 4, 10: [42, -1, -1, -1]}
    assert bool((batch.rejected[batch.is_random] == -1).all())


def test_conditional_drop_keeps_the_first_positions_with_the_chance_of_their_depth() -> None:
    """PARD's rule: nested, ``r ** (k - 1)``, not below the least."""
    config = BatchSection(blocks=8, real_share=0.0, conditional_drop=0.5, least_kept=0.2)
    whole = BatchSection(blocks=8, real_share=0.0)
    counts, rng = torch.zeros(BLOCK - 1), np.random.default_rng(0)
    for _ in range(400):
        state = rng.bit_generator.state
        full = sample_blocks(trajectory(), whole, BLOCK, 7.0, rng)
        rng.bit_generator.state = state
        kept = sample_blocks(trajectory(), config, BLOCK, 7.0, rng)
        inside = full.weights[:, -1] > 0  # blocks that the response does not cut
        rows = kept.weights[inside] > 0
        assert bool((rows.long().diff(dim=1) <= 0).all())
        assert torch.equal(kept.weights[kept.weights > 0], full.weights[kept.weights > 0])
        counts += rows.float().mean(0)
    torch.testing.assert_close(counts / 400, torch.tensor([1.0, 0.5, 0.25, 0.2]), atol=0.04, rtol=0)


def test_a_drop_of_one_reproduces_the_full_loss() -> None:
    both = [
        sample_blocks(trajectory(), config, BLOCK, 7.0, np.random.default_rng(3))
        for config in (BatchSection(), BatchSection(conditional_drop=1.0, least_kept=0.7))
    ]
    assert torch.equal(both[0].weights, both[1].weights)


def test_a_decay_of_infinity_weighs_all_positions_alike() -> None:
    batch = sample_blocks(
        trajectory(), BatchSection(), BLOCK, float("inf"), np.random.default_rng(0)
    )
    assert set(batch.weights.unique().tolist()) <= {0.0, 1.0}
