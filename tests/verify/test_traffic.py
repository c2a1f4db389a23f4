"""What is expected of coming drafts, from those of the same requests."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adaspec.verify import allocate
from adaspec.verify.traffic import Traffic, expected_commits, expected_uniform_commits

DRAFTS = 5


@st.composite
def survivals(draw: st.DrawFn) -> np.ndarray:
    """``[samples, batch, drafts]``, not rising along the block."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)), DRAFTS)
    rows = draw(hnp.arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    return rows.cumprod(-1, dtype=np.float32)


@given(survivals(), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_commits_are_those_of_the_allocation(survival: np.ndarray, extra: int) -> None:
    samples, batch, drafts = survival.shape
    extra = min(extra, batch * drafts)
    expected = 0.0
    for sample in survival:
        lengths = allocate(torch.from_numpy(sample), batch + extra).numpy()
        verified = np.arange(1, drafts + 1) < lengths[:, None]
        expected += (batch + sample[verified].sum()) / samples
    np.testing.assert_allclose(expected_commits(survival)[extra], expected, rtol=1e-4)


@given(survivals())
@settings(max_examples=50, deadline=None)
def test_uniform_commits_are_never_more(survival: np.ndarray) -> None:
    _, batch, drafts = survival.shape
    uniform = expected_uniform_commits(survival)
    ragged = expected_commits(survival)[::batch][: drafts + 1]
    assert (uniform <= ragged + 1e-3).all()
    np.testing.assert_allclose((uniform[0], uniform[-1]), (batch, ragged[-1]), rtol=1e-4)


def rows(traffic: Traffic, request: str) -> np.ndarray:
    return traffic.recent(traffic.admit((request,)))[:, 0]


def test_a_request_is_expected_to_go_on_as_it_did() -> None:
    traffic = Traffic(DRAFTS, max_batch=4)
    slots = traffic.admit(("good", "bad"))
    survival = np.array([[0.9] * DRAFTS, [0.1] * DRAFTS], np.float32)
    for _ in range(8):
        traffic.record_survival(slots, survival)
    assert (rows(traffic, "good") == np.float32(0.9)).all()
    assert (rows(traffic, "bad") == np.float32(0.1)).all()
    # A new one is like one of the others.
    assert set(np.unique(rows(traffic, "new"))) <= {np.float32(0.1), np.float32(0.9)}


def test_history_tells_good_requests_from_bad_and_is_shrunk() -> None:
    traffic = Traffic(DRAFTS, max_batch=4)
    slots = traffic.admit(("good", "usual", "bad", "new"))
    for _ in range(30):
        traffic.record_flags(slots[:3], np.array([5, 2, 0]), np.array([6, 6, 6]))
    traffic.record_flags(slots[3:], np.array([1]), np.array([6]))
    good, usual, bad, new = traffic.history(slots)
    assert good > 1 > usual > bad
    assert bad < -1
    assert abs(new) < 1


def test_requests_that_are_gone_make_room() -> None:
    traffic = Traffic(DRAFTS, max_batch=2)
    for i in range(20):
        batch = (f"a{i}", f"b{i}")
        slots = traffic.admit(batch)
        assert len(set(slots.tolist())) == 2
        traffic.record_survival(slots, np.full((2, DRAFTS), 0.5, np.float32))
    gone = traffic.find(("a0", "b19"))
    assert gone[0] == -1
    assert traffic.history(gone)[0] == 0.0
    # Feedback of a forgotten request is not counted for another.
    before = rows(traffic, "b19").copy()
    traffic.record_survival(traffic.find(("a0",)), np.full((1, DRAFTS), 0.9, np.float32))
    traffic.record_flags(traffic.find(("a0",)), np.array([5]), np.array([6]))
    np.testing.assert_array_equal(rows(traffic, "b19"), before)
