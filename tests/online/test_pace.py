from dataclasses import replace

import numpy as np
import pytest

from online.config import PaceSection
from online.pace import Budget, DriftDetector, Pace, acceptance
from online.trajectory import DraftedBlock, Trajectory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def resting(config: PaceSection) -> Pace:
    pace = Pace(config, Clock())
    for _ in range(config.patience - 1):
        assert not pace.judged(changed=False)
    assert pace.judged(changed=False)
    return pace


def requests(trajectory: Trajectory, rates: np.ndarray) -> list[Trajectory]:
    """Requests of twenty judged drafts each, this share of which was accepted."""
    made = []
    for rate in rates:
        kept = round(20 * float(rate))
        blocks = [DraftedBlock(8, kept, 40, 0)] + [DraftedBlock(8, 0, 6, 0)] * (19 - kept)
        made.append(replace(trajectory, blocks=tuple(blocks)))
    return made


def test_learning_rests_after_candidates_that_change_nothing() -> None:
    pace = Pace(PaceSection(patience=3), Clock())
    assert [pace.judged(c) for c in (False, False, True, False, False)] == [False] * 5
    assert pace.may_learn()
    assert pace.judged(changed=False)
    assert not pace.may_learn()
    pace.wake()
    assert pace.may_learn()


def test_a_patience_of_zero_never_rests() -> None:
    pace = Pace(PaceSection(patience=0), Clock())
    assert not any(pace.judged(changed=False) for _ in range(100))


def test_drift_just_after_it_came_to_rest_is_noticed(trajectories: list[Trajectory]) -> None:
    """What acceptance was like is known from the requests before."""
    pace = Pace(PaceSection(patience=1), Clock())
    rng = np.random.default_rng(3)
    assert pace.saw(requests(trajectories[0], rng.normal(0.5, 0.1, 100).clip(0, 0.9))) is None
    assert pace.judged(changed=False)
    reason = pace.saw(requests(trajectories[0], rng.normal(0.3, 0.1, 40).clip(0, 0.9)))
    assert reason is not None
    assert pace.may_learn()


@pytest.mark.parametrize("change", [-0.2, 0.2])
def test_drift_wakes_it(trajectories: list[Trajectory], change: float) -> None:
    pace = resting(PaceSection(patience=2))
    rng = np.random.default_rng(0)
    assert pace.saw(requests(trajectories[0], rng.normal(0.5, 0.1, 200).clip(0, 0.9))) is None
    assert not pace.may_learn()
    reason = pace.saw(requests(trajectories[0], rng.normal(0.5 + change, 0.1, 30).clip(0, 0.9)))
    assert reason is not None
    assert "drifted" in reason
    assert pace.may_learn()


def test_steady_traffic_lets_it_rest_until_the_retry(trajectories: list[Trajectory]) -> None:
    pace = resting(PaceSection(patience=2, retry=500, drift=20.0))
    rng = np.random.default_rng(1)
    steady = requests(trajectories[0], rng.normal(0.5, 0.1, 499).clip(0, 0.9))
    assert pace.saw(steady) is None
    assert pace.saw(steady[:1]) == "500 requests have come since"
    assert pace.saw(steady) is None  # awake: nothing to wake


def test_false_alarms_are_rare_and_changes_found_soon() -> None:
    """Of 100 runs of 2,000 normal values; then a change of one standard deviation."""
    rng = np.random.default_rng(0)
    false, delays = 0, []
    for _ in range(100):
        detector = DriftDetector(PaceSection().drift)
        false += any([detector.saw(v) for v in rng.normal(0.4, 0.1, 64 + 2000)])
        detector = DriftDetector(PaceSection().drift)
        for value in rng.normal(0.4, 0.1, 64):
            detector.saw(value)
        delays.append(next(i for i in range(500) if detector.saw(rng.normal(0.3, 0.1))))
    assert false <= 5
    assert np.median(delays) <= 35


def test_a_budget_holds_learning_to_its_share_of_the_time() -> None:
    clock = Clock()
    budget, spent = Budget(0.25, 0.0), 0.0
    while clock.now < 3600:
        if budget.allows(clock.now):
            budget.spend(2.0)
            spent += 2.0
            clock.now += 2.0
        else:
            clock.now += 0.5
    assert spent / clock.now == pytest.approx(0.25, abs=0.02)
    # What was not used long ago is lost.
    clock.now += 86400
    burst = 0.0
    while budget.allows(clock.now):
        budget.spend(2.0)
        burst += 2.0
        clock.now += 2.0
    assert burst < 60


def test_without_a_limit_there_is_always_time() -> None:
    budget = Budget(1.0, 0.0)
    budget.spend(1000.0)
    assert budget.allows(1.0)


def test_acceptance_counts_what_was_judged(trajectories: list[Trajectory]) -> None:
    def share(*blocks: DraftedBlock) -> float | None:
        return acceptance(replace(trajectories[0], blocks=blocks))

    assert share(DraftedBlock(8, 3, 16, 0), DraftedBlock(12, 0, 16, 0)) == pytest.approx(3 / 5)
    # Verified short and kept: nothing was rejected.
    assert share(DraftedBlock(8, 3, 4, 0)) == 1.0
    assert share(DraftedBlock(8, 0, 1, 0)) is None
    assert share() is None
