"""A budget becomes prefixes that use it up, the same on every rank."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaspec.verify import VerifyShapes, allocate


@st.composite
def priorities(draw: st.DrawFn) -> torch.Tensor:
    """Rows that do not rise, with many ties."""
    batch, drafts = draw(st.integers(1, 9)), draw(st.integers(1, 15))
    levels = st.lists(st.integers(0, 4), min_size=drafts, max_size=drafts)
    rows = [sorted(draw(levels), reverse=True) for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.float32) / 4


@given(priorities(), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_the_best_drafts_are_taken_as_prefixes_of_the_budget(
    priority: torch.Tensor, tokens: int
) -> None:
    batch, drafts = priority.shape
    lengths = allocate(priority, tokens)
    assert lengths.dtype == torch.int32
    assert int(lengths.min()) >= 1
    assert int(lengths.max()) <= drafts + 1
    assert int(lengths.sum()) == min(max(tokens, batch), batch * (drafts + 1))
    taken = torch.arange(1, drafts + 1) < lengths[:, None]
    best = priority.flatten().sort(descending=True).values[: int(taken.sum())]
    torch.testing.assert_close(priority[taken].sort(descending=True).values, best)


@given(priorities(), st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_ties_go_to_earlier_positions_then_to_earlier_requests(
    priority: torch.Tensor, tokens: int
) -> None:
    level = torch.full_like(priority, 0.5)
    lengths = allocate(level, tokens)
    assert int(lengths.max() - lengths.min()) <= 1
    assert torch.equal(lengths, lengths.sort(descending=True).values)


@given(
    batch=st.integers(1, 128),
    block=st.integers(2, 16),
    ragged=st.booleans(),
    tiers=st.sets(st.integers(1, 2048), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_totals_are_what_the_server_can_run(
    batch: int, block: int, ragged: bool, tiers: set[int]
) -> None:
    shapes = VerifyShapes(block, 128, ragged, token_tiers=tuple(sorted(tiers)) if ragged else ())
    totals = shapes.totals(batch)
    assert totals[0] == batch
    assert (totals[1:] > totals[:-1]).all()
    assert len(totals) > 1
    assert totals[-1] <= batch * block
    if not ragged:
        assert (totals % batch == 0).all()
    for total in totals[1:].tolist():
        padded = shapes.padded(batch, total, drafted=True)
        assert padded >= total
        if ragged and tiers and max(tiers) > batch:
            # A total uses up its tier, unless every draft is verified already.
            assert padded in tiers
            assert total in (padded, batch * block)


def test_a_plain_step_is_padded_to_its_batch_tier() -> None:
    shapes = VerifyShapes(16, 128, ragged=True, token_tiers=(64, 128), batch_tiers=(8, 16))
    assert shapes.padded(9, 9, drafted=False) == 16
    assert shapes.padded(9, 70, drafted=True) == 128
    assert shapes.padded(20, 20, drafted=False) == 20
