"""Calibrated acceptance: what is learned, forgotten, reported, and computed on the device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaspec.verify.step import Flags, Floats, Ints
from adaspec.verify.survival import SAMPLED, DeviceSurvival, SurvivalModel

DRAFTS = 7
BATCH = 32


class Drafter:
    """Drafts with known acceptance, reported twice too sure."""

    def __init__(self, seed: int = 0, log_odds: float = 1.0, penalty: float = 1.0) -> None:
        self.random = np.random.default_rng(seed)
        self.log_odds = log_odds
        self.penalty = penalty  # of sampled requests

    def block(self, sampled: Flags) -> tuple[Floats, Floats]:
        """Conditional acceptance and log-probabilities, ``[batch, drafts]``."""
        x = self.log_odds + self.random.standard_normal((len(sampled), DRAFTS))
        truth = 1 / (1 + np.exp(-(x - self.penalty * sampled[:, None])))
        return truth.astype(np.float32), (-np.log1p(np.exp(-2 * x))).astype(np.float32)

    def accept(self, truth: Floats, lengths: Ints) -> Ints:
        kept = (self.random.random(truth.shape) < truth).cumprod(-1).sum(-1)
        return np.minimum(kept, lengths - 1)


def no_history(batch: int) -> Floats:
    return np.zeros(batch, np.float32)


def train(model: SurvivalModel, drafter: Drafter, steps: int, length: int, share: float) -> None:
    for _ in range(steps):
        sampled = drafter.random.random(BATCH) < share
        truth, log_probs = drafter.block(sampled)
        lengths = np.full(BATCH, length)
        accepted = drafter.accept(truth, lengths)
        model.observe(log_probs, no_history(BATCH), sampled, accepted, lengths)


def error(model: SurvivalModel, drafter: Drafter, sampled: bool) -> float:
    """Mean absolute error of the conditional acceptance."""
    flags = np.full(500, sampled)
    truth, log_probs = drafter.block(flags)
    survival = model.survival(log_probs, no_history(500), flags)
    known = np.concatenate([np.ones((500, 1)), survival[:, :-1]], axis=1)
    return float(np.abs(survival / known - truth).mean())


def test_both_classes_are_calibrated() -> None:
    model, drafter = SurvivalModel(DRAFTS, True), Drafter()
    assert error(model, drafter, sampled=True) > 0.15
    train(model, drafter, steps=300, length=DRAFTS + 1, share=0.5)
    assert error(model, drafter, sampled=False) < 0.04
    assert error(model, drafter, sampled=True) < 0.04
    for kind in range(2):
        assert model.report(kind).mean_ece < 0.06
        assert (model.report(kind).log_loss < 0.69).all()  # a coin's


def test_short_lengths_do_not_bias_what_follows() -> None:
    """Positions never verified are predicted from those that were."""
    model, drafter = SurvivalModel(DRAFTS, True), Drafter()
    train(model, drafter, steps=100, length=3, share=0.0)
    assert error(model, drafter, sampled=False) < 0.05
    report = model.report()
    assert (report.flags[2:] == 0).all()
    assert np.isnan(report.ece[2:]).all()


def test_lengths_chosen_by_confidence_do_not_bias() -> None:
    model, drafter = SurvivalModel(DRAFTS, True), Drafter()
    for _ in range(150):
        truth, log_probs = drafter.block(np.zeros(BATCH, bool))
        lengths = np.where(log_probs[:, 0] > np.median(log_probs[:, 0]), DRAFTS + 1, 3)
        accepted = drafter.accept(truth, lengths)
        model.observe(log_probs, no_history(BATCH), np.zeros(BATCH, bool), accepted, lengths)
    assert error(model, drafter, sampled=False) < 0.04


def test_a_changed_drafter_is_followed_faster_when_announced() -> None:
    announced, silent = SurvivalModel(DRAFTS, True), SurvivalModel(DRAFTS, True)
    for model in (announced, silent):
        train(model, Drafter(), steps=200, length=DRAFTS + 1, share=0.0)
    announced.drafter_changed()
    for model in (announced, silent):
        train(model, Drafter(1, log_odds=1.0, penalty=0.0), steps=8, length=8, share=0.0)
    worse = Drafter(2, log_odds=1.0, penalty=2.0)
    for model in (announced, silent):
        # The same probabilities, accepted less: only the flags can tell.
        for _ in range(16):
            truth, log_probs = worse.block(np.ones(BATCH, bool))
            lengths = np.full(BATCH, DRAFTS + 1)
            accepted = worse.accept(truth, lengths)
            greedy = np.zeros(BATCH, bool)
            model.observe(log_probs, no_history(BATCH), greedy, accepted, lengths)

    def miss(model: SurvivalModel) -> float:
        truth, log_probs = worse.block(np.ones(500, bool))
        first = model.survival(log_probs, no_history(500), np.zeros(500, bool))[:, 0]
        return float(np.abs(first - truth[:, 0]).mean())

    assert miss(announced) < miss(silent)


def test_positions_and_history_do_without_confidence() -> None:
    model, random = SurvivalModel(DRAFTS, False), np.random.default_rng(0)
    truth = np.linspace(0.9, 0.3, DRAFTS)
    greedy, lengths = np.zeros(BATCH, bool), np.full(BATCH, DRAFTS + 1)
    for _ in range(200):
        history = random.standard_normal(BATCH).astype(np.float32)
        log_odds = np.log(truth / (1 - truth)) + history[:, None]
        kept = random.random((BATCH, DRAFTS)) < 1 / (1 + np.exp(-log_odds))
        model.observe(None, history, greedy, kept.cumprod(-1).sum(-1), lengths)
    survival = model.survival(None, np.array([0.0, 1.0], np.float32), np.zeros(2, bool))
    np.testing.assert_allclose(survival[0, :4], truth.cumprod()[:4], atol=0.05)
    assert (survival[1] > survival[0]).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_device_computes_the_same(sampled: bool) -> None:
    model, drafter = SurvivalModel(DRAFTS, True), Drafter()
    on_device = DeviceSurvival(model, torch.device("cpu"))
    for _ in range(2):  # the copy of the maps follows the fits
        train(model, drafter, steps=20, length=DRAFTS + 1, share=0.5)
        flags = np.arange(BATCH) % 2 == 0 if sampled else np.zeros(BATCH, bool)
        _, log_probs = drafter.block(flags)
        history = drafter.random.standard_normal(BATCH).astype(np.float32)
        expected = model.survival(log_probs, history, flags)
        given_tensor = on_device(torch.from_numpy(log_probs), history, flags)
        torch.testing.assert_close(given_tensor, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
        without = on_device(None, history, flags)
        assert without.shape == given_tensor.shape


@given(
    st.lists(
        st.floats(-1e4, 0.0, width=32) | st.sampled_from([float("nan"), -float("inf"), 0.0]),
        min_size=DRAFTS,
        max_size=DRAFTS,
    ),
    st.floats(-3, 3, width=32),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_survival_is_a_falling_probability_whatever_the_drafter_says(
    log_probs: list[float], history: float, sampled: bool
) -> None:
    model = SurvivalModel(DRAFTS, True)
    row, flags = np.array([log_probs], np.float32), np.array([sampled])
    past = np.array([history], np.float32)
    on_device = DeviceSurvival(model, torch.device("cpu"))(torch.from_numpy(row), past, flags)
    for survival in (model.survival(row, past, flags), on_device.numpy()):
        assert ((survival >= 0) & (survival <= 1)).all()
        assert (np.diff(survival) <= 0).all()
        assert survival.dtype == np.float32


def test_the_sampled_class_does_not_touch_the_greedy_one() -> None:
    model = SurvivalModel(DRAFTS, True)
    before = model.parameters[0].copy()
    train(model, Drafter(), steps=20, length=DRAFTS + 1, share=1.0)
    np.testing.assert_array_equal(model.parameters[0], before)
    assert model.report(SAMPLED).flags.sum() > 0


def test_drafts_that_were_not_read_are_as_sure_as_usual() -> None:
    model = SurvivalModel(4, has_confidence=True)
    usual = np.log(np.array([0.9, 0.8, 0.7, 0.6], np.float32))
    batch = np.tile(usual, (8, 1))
    history, sampled = np.zeros(8, np.float32), np.zeros(8, dtype=np.bool_)
    for _ in range(400):
        model.observe(batch, history, sampled, np.zeros(8, np.int64), np.full(8, 1))
    whole = model.survival(batch, history, sampled)
    cut = model.survival(batch[:, :2], history, sampled)
    np.testing.assert_allclose(cut, whole, rtol=1e-3)
    device = DeviceSurvival(model, torch.device("cpu"))
    read = device(torch.tensor(batch[:, :2]), history, sampled).numpy()
    np.testing.assert_allclose(read, whole[:, :2], rtol=1e-4)
