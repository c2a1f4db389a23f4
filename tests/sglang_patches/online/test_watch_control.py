"""Versions that are compared with the base at the same time: what goes, how soon, and what stays.

Requests differ in how well they can be drafted, stay for a while and are replaced by others; base
and versions draft for the same requests, in windows as `ControlWindows` opens them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from adaspec.config import WatchConfig
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.served import Served, Standing
from sglang_patches.online.watch import AcceptanceWatch, Outcome

DRAFTS = 7  # of a block
STATED_TOKENS = 65536  # within which a loss of 20 % is found, in docs/online.md
CONFIG = WatchConfig()

_CHANCES = np.linspace(0.0, 0.999, 2000)
_COMMITTED = (1 - _CHANCES ** (DRAFTS + 1)) / (1 - _CHANCES)  # expected, at that chance per draft


class NoWeights:
    """In the place of the served weights."""

    on_gpu = False

    def draft_with_base(self) -> None: ...

    def draft_with_live(self) -> None: ...


class Traffic:
    """Running requests, each with its own expected commits per pass."""

    def __init__(self, seed: int, requests: int) -> None:
        self._random = np.random.default_rng(seed)
        self._rate, self._left = np.zeros(requests), np.zeros(requests, dtype=int)

    def rates(self, steps: int) -> np.ndarray:
        """``[steps, requests]``, of the base."""
        rates = np.empty((steps, len(self._rate)))
        for row in rates:
            new = self._left <= 0
            drawn = np.exp(self._random.normal(np.log(2.6), 0.3, len(new)))
            self._rate = np.where(new, drawn, self._rate)
            self._left = np.where(new, self._random.integers(40, 300, len(new)), self._left) - 1
            row[:] = self._rate
        return rates

    def committed(self, rates: np.ndarray) -> Sequence[int]:
        """Tokens of all requests in each step."""
        chance = np.interp(rates, _COMMITTED, _CHANCES)
        run = np.log(self._random.random(rates.shape)) / np.log(np.maximum(chance, 1e-9))
        return (1 + np.minimum(run.astype(int), DRAFTS)).sum(axis=1).tolist()


@dataclass
class Life:
    """A server's life under watch."""

    seed: int
    requests: int
    share: float = CONFIG.control_share

    def __post_init__(self) -> None:
        self.control = ControlWindows(NoWeights(), Served(0, "base"), self.share)
        self.watch = AcceptanceWatch(CONFIG, self.control.standing)
        self.traffic = Traffic(self.seed, self.requests)
        self.tokens = 0

    def swap(self, number: int, context: str = "base", rolled_back: bool = False) -> Standing:
        self.control.close()
        self.control.follow(Served(number, context))
        self.watch.swapped(rolled_back, self.control.standing)
        self.tokens = 0
        return self.control.standing

    def serve(
        self, gain: float, tokens: int, shift: float = 1.0, until: bool | None = None
    ) -> Outcome | None:
        """Serve until an outcome (if ``until`` is given, a roll-back or its opposite), or until
        ``tokens`` are committed.
        """
        self.tokens = 0
        while self.tokens < tokens:
            rates = shift * self.traffic.rates(400)
            base, live = self.traffic.committed(rates), self.traffic.committed(gain * rates)
            for base_step, live_step in zip(base, live, strict=True):
                self.control.before_step()
                committed = base_step if self.control.is_open else live_step
                outcome = self.watch.observe(committed, self.requests, self.control.is_open)
                self.control.count_draft()
                self.tokens += committed
                if outcome is not None and until in (None, outcome.roll_back):
                    return outcome
        return None


@pytest.mark.parametrize("requests", [1, 4, 16])
@pytest.mark.parametrize("shift", [1.0, 0.7])
def test_a_loss_of_a_fifth_is_found_within_the_stated_tokens(requests: int, shift: float) -> None:
    runs, found = 20, 0
    for seed in range(runs):
        life = Life(seed, requests)
        life.swap(1)
        found += life.serve(0.8, STATED_TOKENS, shift, until=True) is not None
    assert found >= 0.95 * runs


@pytest.mark.parametrize("gain", [1.0, 1.2])
def test_a_fall_of_traffic_is_not_held_against_a_version(gain: float) -> None:
    """Acceptance falls by 30 % at the moment of the swap, for the base as for the version."""
    for seed in range(30):
        life = Life(seed, requests=4)
        life.serve(1.0, 2 * CONFIG.window_tokens)
        life.swap(1)
        assert life.serve(gain, STATED_TOKENS, shift=0.7, until=True) is None


def test_without_a_control_such_a_fall_is_mistaken_for_the_versions_doing() -> None:
    life = Life(seed=0, requests=4, share=0.0)
    life.serve(1.0, 2 * CONFIG.window_tokens)
    assert life.swap(1) == "alone"
    outcome = life.serve(1.0, STATED_TOKENS, shift=0.7)
    assert outcome is not None
    assert outcome.roll_back


@pytest.mark.parametrize("shift", [1.0, 0.7, 1.3])
def test_a_version_that_loses_what_the_one_before_had_gained_goes(shift: float) -> None:
    """It is no worse than the base, so only the gain before tells; a shift changes nothing."""
    given_up = stayed = 0
    for seed in range(10):
        for gain in (1.0, 1.4):
            life = Life(seed, requests=16)
            life.swap(1)
            proved = life.serve(1.4, 20 * STATED_TOKENS)
            assert proved is not None
            assert not proved.roll_back
            life.swap(2)
            outcome = life.serve(gain, 20 * STATED_TOKENS, shift)
            assert outcome is not None
            given_up += gain == 1.0 and outcome.roll_back
            stayed += gain == 1.4 and not outcome.roll_back
    assert (given_up, stayed) == (10, 10)


def test_a_version_that_proved_itself_and_then_falls_below_the_base_goes() -> None:
    life = Life(seed=1, requests=8)
    life.swap(1)
    proved = life.serve(1.2, 20 * STATED_TOKENS)
    assert proved is not None
    assert not proved.roll_back
    assert not life.watch.on_trial
    assert life.serve(1.2, 10 * STATED_TOKENS) is None
    assert life.watch.gain is not None
    assert life.watch.gain.value == pytest.approx(1.2, abs=0.1)
    outcome = life.serve(0.8, 20 * STATED_TOKENS)
    assert outcome is not None
    assert outcome.roll_back
    assert "times the base's committed tokens per pass" in outcome.reason


def test_the_base_is_not_on_trial_where_it_is_the_measure() -> None:
    life = Life(seed=1, requests=4)
    life.swap(1)
    assert life.watch.on_trial
    assert life.swap(0) == "base"
    assert not life.watch.on_trial
    assert life.serve(1.0, STATED_TOKENS, shift=0.5) is None
    assert life.watch.gain is None


def test_a_version_with_context_weights_of_its_own_is_compared_with_the_traffic_before() -> None:
    for gain, goes in ((0.6, True), (1.0, False)):
        life = Life(seed=2, requests=4)
        life.serve(1.0, 2 * CONFIG.window_tokens)
        assert life.swap(1, context="other") == "alone"
        outcome = life.serve(gain, STATED_TOKENS)
        assert outcome is not None
        assert outcome.roll_back == goes
        assert "before" in outcome.reason


def test_the_restored_version_keeps_what_it_is_compared_with() -> None:
    life = Life(seed=3, requests=16)
    life.swap(1)
    life.serve(1.4, 20 * STATED_TOKENS)
    for number in (2, 3):
        life.swap(number)
        outcome = life.serve(1.0, 20 * STATED_TOKENS)
        assert outcome is not None
        assert outcome.roll_back
        life.swap(1, rolled_back=True)
        assert not life.watch.on_trial
