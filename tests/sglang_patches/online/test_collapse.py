"""The detector of collapses: what it calls one, how soon, and how rarely in error."""

import random
from collections.abc import Callable, Sequence

import pytest

from sglang_patches.online.collapse import CollapseDetector, Evidence, SeenRequest

BLOCK = 8
LENGTHS = 30  # passes of a request
# Of a drafter whose every draft is accepted with probability 0.7, given those before.
SURVIVAL = [0.7**k for k in range(1, BLOCK)]
EXPECTED = [0.0, 0.0, *(sum(SURVIVAL[:k]) for k in range(1, BLOCK))]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Traffic:
    """Requests one after the other in slots of a batch, each with an acceptance of its own."""

    def __init__(self, detector: CollapseDetector, clock: Clock, seed: int, batch: int = 8) -> None:
        self.detector = detector
        self.clock = clock
        self.random = random.Random(seed)
        self.rates = [0.0] * batch
        self.requests = [SeenRequest("", False, True)] * batch
        self.left = [0] * batch
        self.steps = 0
        self.base_rate: float | None = None

    def step(self, rate: Callable[[bool], float], cached: float = 0.0) -> Evidence | None:
        """A step; ``rate`` gives the mean acceptance of requests with and without a prefix."""
        self.steps += 1
        self.clock.now += 0.02
        for slot, left in enumerate(self.left):
            if left == 0:
                is_cached = self.random.random() < cached
                name = f"{self.steps}-{slot}"
                self.requests[slot] = SeenRequest(name, is_cached, True)
                mean = rate(is_cached)
                # Requests differ: a standard deviation of about 0.15 at a mean of 0.7.
                self.rates[slot] = self.random.betavariate(8 * mean, 8 * (1 - mean)) if mean else 0
                self.left[slot] = self.random.randint(1, 2 * LENGTHS)
            self.left[slot] -= 1
        by_base = self.base_rate is not None and self.steps % 8 == 0
        rates = [self.base_rate or 0.0] * len(self.rates) if by_base else self.rates
        if not self.detector.wants(len(rates)):
            return None
        accepted = [self._accepted(rate) for rate in rates]
        return self.detector.count(self.requests, accepted, [BLOCK] * len(rates), by_base)

    def run(
        self, steps: int, rate: float | Callable[[bool], float], cached: float = 0.0
    ) -> list[tuple[int, Evidence]]:
        """What was raised, and after how many steps."""
        function = rate if callable(rate) else lambda _: rate
        found = []
        for step in range(steps):
            evidence = self.step(function, cached)
            if evidence is not None:
                found.append((step, evidence))
        return found

    def change_all(self, rate: float) -> None:
        """The requests in flight, too, are accepted at this rate from now on."""
        self.rates = [rate] * len(self.rates)

    def _accepted(self, rate: float) -> int:
        count = 0
        while count < BLOCK - 1 and self.random.random() < rate:
            count += 1
        return count


def traffic(seed: int = 0, expected: Sequence[float] | None = EXPECTED, batch: int = 8) -> Traffic:
    clock = Clock()
    return Traffic(CollapseDetector(expected, clock), clock, seed, batch)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.7, 0.55])
def test_a_drafter_that_works_raises_no_alarm(batch: int, rate: float) -> None:
    """0.55 is well over half of the expected drafts; some 1,000 windows in all."""
    steps = 12_000 if batch == 1 else 6_000
    for seed in range(3):
        assert traffic(seed, batch=batch).run(steps, rate) == []


def test_at_the_threshold_alarms_are_rare() -> None:
    """A drafter that keeps exactly half of its promise: one pair of windows in 10,000 or so."""
    promised = EXPECTED[BLOCK] / 2
    rate = min(
        (r / 1000 for r in range(300, 700)),
        key=lambda r: abs(sum(r**k for k in range(1, BLOCK)) - promised),
    )
    steps_in_a_window = 100  # two seconds
    runs = [traffic(seed) for seed in range(20)]
    raised = sum(len(run.run(40 * steps_in_a_window, rate + 0.02)) for run in runs)
    assert raised <= 3  # in 800 windows, of requests whose mean acceptance is not known any better


def test_traffic_that_changes_a_little_is_no_collapse() -> None:
    run = traffic()
    assert run.run(3000, 0.7) == []
    assert run.run(3000, 0.6) == []
    assert run.run(3000, 0.75) == []


@pytest.mark.parametrize("expected", [None, EXPECTED])
def test_a_dead_drafter_is_noticed_soon_and_its_return_too(
    expected: Sequence[float] | None,
) -> None:
    run = traffic(expected=expected)
    assert run.run(3000, 0.7) == []
    run.change_all(0.0)
    ((step, evidence),) = run.run(1000, 0.0)
    assert step <= 3 * 2.0 / 0.02 + 100  # three windows of two seconds, and what they need to fill
    assert evidence.rule in ("floor", "level", "expectation")
    assert evidence.figures.first.value < 0.05
    assert evidence.worked
    assert run.detector.collapsed
    assert run.run(1000, 0.7) == []
    assert not run.detector.collapsed


def test_a_drafter_that_never_worked_is_told_from_one_that_did() -> None:
    ((_, evidence),) = traffic().run(2000, 0.01)
    assert evidence.rule == "floor"
    assert not evidence.worked
    assert evidence.level is None


def test_less_than_half_of_what_was_promised_is_a_collapse() -> None:
    ((_, evidence),) = traffic().run(2000, 0.35)
    assert evidence.rule == "expectation"
    assert evidence.figures.fulfilled is not None
    assert evidence.figures.fulfilled.value < 0.5
    assert traffic(expected=None).run(2000, 0.35) == []


def test_without_a_promise_the_drafter_is_measured_by_itself() -> None:
    run = traffic(expected=None)
    assert run.run(3000, 0.7) == []
    ((_, evidence),) = run.run(2000, 0.2)
    assert evidence.rule == "level"
    assert evidence.level == pytest.approx(0.7, abs=0.05)


def test_traffic_that_has_changed_for_good_becomes_the_level() -> None:
    run = traffic(expected=None)
    run.run(3000, 0.7)
    run.run(2000, 0.2)
    assert run.detector.collapsed
    run.clock.now += 3600
    run.run(1000, 0.2)
    assert not run.detector.collapsed
    assert run.run(3000, 0.2) == []


def test_requests_with_a_cached_prefix_cannot_hide_behind_the_others() -> None:
    run = traffic()
    assert run.run(2000, 0.7, cached=0.5) == []
    ((_, evidence),) = run.run(3000, lambda cached: 0.02 if cached else 0.7, cached=0.3)
    assert evidence.of_cached
    assert evidence.fresh is not None
    assert evidence.cached is not None
    assert evidence.fresh.first.value > 0.5 > 0.05 > evidence.cached.first.value


def test_the_base_is_seen_beside_a_version_that_collapses() -> None:
    run = traffic()
    run.base_rate = 0.7
    ((_, evidence),) = run.run(2000, 0.01)
    assert evidence.base is not None
    assert evidence.base.first.value > 0.5


def test_another_version_is_measured_anew() -> None:
    run = traffic(expected=None)
    run.run(3000, 0.7)
    run.detector.drafter_changed()
    assert run.run(2000, 0.2) == []


def test_large_steps_are_counted_in_part() -> None:
    run = traffic(batch=128)
    counted = [run.detector.wants(128) for _ in range(400)]
    assert sum(counted) == pytest.approx(100, abs=2)


def test_steps_that_verify_nothing_say_nothing() -> None:
    detector = CollapseDetector(EXPECTED, Clock())
    request = [SeenRequest("a", False, True)]
    assert all(detector.count(request, [0], [1]) is None for _ in range(5000))
    assert not detector.collapsed
