"""What is expected of coming drafts, from those of the same requests."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adaspec.verify import allocate
from adaspec.verify.forecast import AcceptanceCurve, Forecast
from adaspec.verify.traffic import Traffic

DRAFTS = 5


@st.composite
def survivals(draw: st.DrawFn) -> np.ndarray:
    """``[samples, batch, drafts]``, not rising along the block."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)), DRAFTS)
    rows = draw(hnp.arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    return rows.cumprod(-1, dtype=np.float32)


@given(survivals(), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_accepted_drafts_are_those_of_the_allocation(survival: np.ndarray, extra: int) -> None:
    samples, batch, drafts = survival.shape
    extra = min(extra, batch * drafts)
    expected = 0.0
    for sample in survival:
        lengths = allocate(torch.from_numpy(sample), batch + extra).numpy()
        verified = np.arange(1, drafts + 1) < lengths[:, None]
        expected += sample[verified].sum() / samples
    curve = AcceptanceCurve.of(survival, ragged=True)
    at = np.array([extra / batch])
    np.testing.assert_allclose(batch * curve.at(at), expected, rtol=1e-4, atol=1e-6)


@given(survivals())
@settings(max_examples=50, deadline=None)
def test_uniform_steps_never_accept_more(survival: np.ndarray) -> None:
    at = np.arange(DRAFTS + 1.0)
    uniform = AcceptanceCurve.of(survival, ragged=False).at(at)
    ragged = AcceptanceCurve.of(survival, ragged=True).at(at)
    assert (uniform <= ragged + 1e-5).all()
    np.testing.assert_allclose(uniform[[0, -1]], ragged[[0, -1]], rtol=1e-5, atol=1e-6)


def forecast(traffic: Traffic, batch: tuple[str, ...], drafting: bool = True) -> float:
    """Expected accepted drafts per request when all are verified."""
    at = np.array([float(DRAFTS)])
    forecast = Forecast(traffic, ragged=True, reads=(DRAFTS,))
    return float(forecast.accepted(traffic.admit(batch), at, drafting)[0, 0])


def test_a_request_that_differs_is_forecast_by_what_it_did() -> None:
    traffic = Traffic(DRAFTS, max_batch=4)
    slots = traffic.admit(("good", "bad"))
    survival = np.array([[0.9] * DRAFTS, [0.1] * DRAFTS], np.float32)
    for _ in range(20):
        traffic.record_survival(slots, survival)
    both = forecast(traffic, ("good", "bad"))
    assert abs(both - 0.5 * DRAFTS) < 0.01
    # They differ by themselves, not by chance.
    assert traffic.difference() == 1.0
    assert abs(forecast(traffic, ("good",)) - 0.9 * DRAFTS) < 0.01
    assert abs(forecast(traffic, ("bad",)) - 0.1 * DRAFTS) < 0.01


def test_requests_that_are_alike_are_forecast_alike() -> None:
    traffic, random = Traffic(DRAFTS, max_batch=8), np.random.default_rng(0)
    batch = tuple("abcdefgh")
    slots = traffic.admit(batch)
    for _ in range(40):
        acceptance = random.random((8, DRAFTS)).astype(np.float32)
        traffic.record_survival(slots, acceptance.cumprod(-1, dtype=np.float32))
    assert traffic.difference() < 0.6
    spread = np.std([forecast(traffic, (request,)) for request in batch])
    assert spread < 0.6 * np.std([rows(traffic, request).sum(-1).mean() for request in batch])


def test_while_nothing_is_drafted_the_last_trial_counts() -> None:
    traffic = Traffic(DRAFTS, max_batch=4)
    slots = traffic.admit(("a", "b"))
    for acceptance, blocks in ((0.1, 20), (0.9, 4)):
        for _ in range(blocks):
            traffic.record_survival(slots, np.full((2, DRAFTS), acceptance, np.float32))
    assert traffic.difference() == 0.0
    assert forecast(traffic, ("a", "b"), drafting=False) > 0.85 * DRAFTS
    assert forecast(traffic, ("a", "b"), drafting=True) < 0.5 * DRAFTS


def rows(traffic: Traffic, request: str) -> np.ndarray:
    return traffic.recent(traffic.admit((request,)), 16)[:, 0]


def test_a_request_is_expected_to_go_on_as_it_did() -> None:
    traffic = Traffic(DRAFTS, max_batch=4)
    slots = traffic.admit(("good", "bad"))
    survival = np.array([[0.9] * DRAFTS, [0.1] * DRAFTS], np.float32)
    for _ in range(16):
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
