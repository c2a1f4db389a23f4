"""Which versions are given up, and how soon, where there is no control."""

import random

import pytest

from adaspec.config import WatchConfig
from sglang_patches.online.watch import AcceptanceWatch, Outcome

REQUESTS = 4
CONFIG = WatchConfig(window_tokens=6000, max_fall=0.05, confidence=0.99)


class Traffic:
    """Steps of a few requests whose drafts are accepted with some probability, up to 7 in a row."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def step(self, probability: float) -> int:
        return sum(1 + self._run(probability) for _ in range(REQUESTS))

    def _run(self, probability: float) -> int:
        for accepted in range(7):
            if self._random.random() >= probability:
                return accepted
        return 7


def serve(
    watch: AcceptanceWatch, traffic: Traffic, probability: float, tokens: int
) -> tuple[Outcome | None, int]:
    """Serve until a trial ends or enough tokens are committed; (outcome, committed tokens)."""
    committed = 0
    while committed < tokens:
        step = traffic.step(probability)
        committed += step
        outcome = watch.observe(step, REQUESTS)
        if outcome is not None:
            return outcome, committed
    return None, committed


def trial(before: float, after: float, seed: int = 0) -> tuple[Outcome | None, int]:
    watch, traffic = AcceptanceWatch(CONFIG, "alone"), Traffic(seed)
    serve(watch, traffic, before, CONFIG.window_tokens)
    watch.swapped(False, "alone")
    return serve(watch, traffic, after, 2 * CONFIG.window_tokens)


def test_a_bad_version_is_given_up_within_the_window() -> None:
    for seed in range(20):
        outcome, committed = trial(0.7, 0.4, seed)
        assert outcome is not None
        assert outcome.roll_back
        assert committed <= CONFIG.window_tokens / 2


@pytest.mark.parametrize("after", [0.7, 0.75])
def test_a_version_that_is_no_worse_stays(after: float) -> None:
    given_up = 0
    for seed in range(40):
        outcome, committed = trial(0.7, after, seed)
        assert outcome is not None
        assert committed < CONFIG.window_tokens + 1000
        given_up += outcome.roll_back
    assert given_up == 0


def test_the_reason_has_the_numbers() -> None:
    outcome, _ = trial(0.7, 0.4)
    assert outcome is not None
    assert "committed tokens per pass over" in outcome.reason
    assert "before" in outcome.reason


def test_without_traffic_before_nothing_is_given_up() -> None:
    watch = AcceptanceWatch(CONFIG, "alone")
    watch.swapped(False, "alone")
    outcome, _ = serve(watch, Traffic(0), 0.1, 2 * CONFIG.window_tokens)
    assert outcome is not None
    assert not outcome.roll_back
    assert "too few before" in outcome.reason


def test_versions_are_compared_with_the_last_one_that_stayed() -> None:
    watch, traffic = AcceptanceWatch(CONFIG, "alone"), Traffic(0)
    serve(watch, traffic, 0.8, CONFIG.window_tokens)
    # Each loses too little to be noticed at once, and is replaced before its trial ends.
    for probability in (0.76, 0.72, 0.68, 0.64):
        watch.swapped(False, "alone")
        outcome, _ = serve(watch, traffic, probability, 800)
        if outcome is not None:
            break
    else:
        outcome, _ = serve(watch, traffic, 0.64, 2 * CONFIG.window_tokens)
    assert outcome is not None
    assert outcome.roll_back


def test_after_a_roll_back_nothing_is_on_trial() -> None:
    watch, traffic = AcceptanceWatch(CONFIG, "alone"), Traffic(0)
    serve(watch, traffic, 0.7, CONFIG.window_tokens)
    watch.swapped(False, "alone")
    outcome, _ = serve(watch, traffic, 0.2, 2 * CONFIG.window_tokens)
    assert outcome is not None
    watch.swapped(True, "alone")
    assert not watch.on_trial
    assert serve(watch, traffic, 0.2, 2 * CONFIG.window_tokens)[0] is None
