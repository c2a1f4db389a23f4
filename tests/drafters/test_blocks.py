"""Blocks on trajectories: layout, anchors, labels, against direct readings of the definitions."""

import torch

from adaspec.drafters.blocks import (
    block_labels,
    block_position_ids,
    block_token_ids,
    sample_anchors,
)

MASK = 99


def test_a_block_is_its_anchor_and_masks_at_consecutive_positions() -> None:
    anchors = torch.tensor([[7, 8], [9, 10]])
    assert block_token_ids(anchors, 4, MASK).tolist() == [
        [[7, MASK, MASK, MASK], [8, MASK, MASK, MASK]],
        [[9, MASK, MASK, MASK], [10, MASK, MASK, MASK]],
    ]
    assert block_position_ids(torch.tensor([3, 11]), 3).tolist() == [[3, 4, 5], [11, 12, 13]]


def test_anchors_are_distinct_ascending_and_have_a_label() -> None:
    torch.manual_seed(0)
    mask = torch.rand(6, 40) < 0.7
    anchors, kept = sample_anchors(mask, 12)
    for row in range(6):
        chosen = anchors[row][kept[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert all(mask[row, a] and mask[row, a + 1] for a in chosen)
        possible = sum(bool(mask[row, a] and mask[row, a + 1]) for a in range(39))
        assert len(chosen) == min(12, possible)


def test_every_candidate_is_drawn_equally_often() -> None:
    mask = torch.zeros(4000, 12, dtype=torch.bool)
    mask[:, 2:9] = True  # candidates 2 .. 7
    anchors, kept = sample_anchors(mask, 2, torch.Generator().manual_seed(0))
    assert kept.all()
    counts = torch.bincount(anchors.flatten(), minlength=12)
    assert counts[[0, 1, 8, 9, 10, 11]].sum() == 0
    expected = 8000 / 6
    chi_square = ((counts[2:8] - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_sequences_without_candidates_keep_nothing() -> None:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 4] = True  # the last position has no next one
    anchors, kept = sample_anchors(mask, 8)
    assert anchors.shape == kept.shape == (2, 5)
    assert not kept.any()
    assert anchors.eq(0).all()


def test_the_same_generator_state_gives_the_same_anchors() -> None:
    mask = torch.ones(3, 30, dtype=torch.bool)
    first, second = (sample_anchors(mask, 4, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_labels_follow_the_definition() -> None:
    torch.manual_seed(1)
    batch, length, blocks, size = 5, 24, 9, 6
    tokens = torch.randint(0, 3, (batch, length))
    deviates = torch.rand(batch, length) < 0.2
    teacher = torch.where(deviates, (tokens + 1) % 3, tokens)
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[:, 4:20] = True
    anchors, kept = sample_anchors(mask, blocks)
    labels = block_labels(anchors, kept, tokens, teacher, mask, size)
    for row in range(batch):
        for block in range(blocks):
            on_path = bool(kept[row, block])
            for k in range(1, size):
                position = int(anchors[row, block]) + k
                counts = on_path and position < length and bool(mask[row, position])
                assert bool(labels.valid[row, block, k - 1]) == counts
                if counts:
                    assert labels.tokens[row, block, k - 1] == teacher[row, position]
                    on_path = bool(tokens[row, position] == teacher[row, position])
    assert labels.valid.any()
    assert not labels.valid.all()
