"""When to learn: within a budget of time, not while nothing improves, again when traffic drifts.

Learning rests after some candidates in a row that changed nothing. From then on the acceptance of
each request is compared with what it was: a two-sided CUSUM (Page 1954) of its standardised
deviations, with an allowance of half a standard deviation. At the default threshold most changes by
one standard deviation are found within 35 requests, and of simulated stretches of 2,000 requests
without a change at most 5 % give a false alarm, which costs some training and nothing else
(`test_false_alarms_are_rare_and_changes_found_soon`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from online.config import PaceSection
from online.trajectory import Trajectory

# Requests that tell what acceptance is like: the last ones before learning came to rest.
_REFERENCE = 64
_ALLOWANCE = 0.5
# Time constant of the budget.
_BUDGET_SECONDS = 120.0
_LEAST_DEVIATION = 0.02


class Budget:
    """Holds learning to a share of the time.

    Args:
        most: the share; 1 is no limit.
        now: seconds, monotonic.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most = most
        self._last = now
        self._credit = 0.0

    def spend(self, seconds: float) -> None:
        """Note time spent learning."""
        self._credit -= seconds

    def allows(self, now: float) -> bool:
        """Whether there is time left; what is not used within two minutes is lost."""
        self._credit = min(
            self._most * _BUDGET_SECONDS, self._credit + self._most * (now - self._last)
        )
        self._last = now
        return self._most == 1 or self._credit >= 0


@dataclass
class DriftDetector:
    """Whether values have left the level of the first ones.

    Attributes:
        threshold: in standard deviations, summed over values.
        reference: values whose level it is; the first that come are added while there are few.
    """

    threshold: float
    reference: list[float] = field(default_factory=list)
    _above: float = 0.0
    _below: float = 0.0

    def saw(self, value: float) -> bool:
        """Take a value; True if the level has changed."""
        count = len(self.reference)
        if count < _REFERENCE:
            self.reference.append(value)
            return False
        mean = sum(self.reference) / count
        spread = sum((v - mean) ** 2 for v in self.reference) / (count - 1)
        # The mean of the reference is itself uncertain.
        deviation = max(math.sqrt(spread * (1 + 1 / count)), _LEAST_DEVIATION)
        score = (value - mean) / deviation
        self._above = max(0.0, self._above + score - _ALLOWANCE)
        self._below = max(0.0, self._below - score - _ALLOWANCE)
        return max(self._above, self._below) > self.threshold


class Pace:
    """Decides whether the learner may take a step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, config: PaceSection, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._budget = Budget(config.most, clock())
        self._unchanged = 0
        self._rested = 0
        self._recent: deque[float] = deque(maxlen=_REFERENCE)
        self._detector: DriftDetector | None = None

    @property
    def is_resting(self) -> bool:
        """Whether learning rests because nothing improved."""
        return self._detector is not None

    def may_learn(self) -> bool:
        """Whether learning does not rest, and is within its budget."""
        return not self.is_resting and self._budget.allows(self._clock())

    def spent(self, seconds: float) -> None:
        """Note time spent learning."""
        self._budget.spend(seconds)

    def judged(self, changed: bool) -> bool:
        """Note a candidate's fate; True if learning comes to rest with it."""
        self._unchanged = 0 if changed else self._unchanged + 1
        if self._config.patience == 0 or self._unchanged < self._config.patience:
            return False
        self._detector = DriftDetector(self._config.drift, list(self._recent))
        self._rested = 0
        return True

    def saw(self, requests: Sequence[Trajectory]) -> str | None:
        """Note finished requests; the reason if learning resumes with them."""
        reason: str | None = None
        for request in requests:
            share = acceptance(request)
            if share is not None:
                self._recent.append(share)
            if self._detector is None:
                continue
            self._rested += 1
            if share is not None and self._detector.saw(share):
                reason = self._resume(f"acceptance has drifted within {self._rested} requests")
            elif self._rested >= self._config.retry:
                reason = self._resume(f"{self._rested} requests have come since")
        return reason

    def wake(self) -> None:
        """Learn again, whatever was seen: the weights have been replaced."""
        self._unchanged = 0
        self._detector = None

    def _resume(self, reason: str) -> str:
        self.wake()
        return reason


def acceptance(request: Trajectory) -> float | None:
    """Accepted share of the drafts that were judged: those kept, and the rejected ones.

    Drafts behind a rejection were never judged, and where a block was verified short and kept,
    nothing was rejected: so the share does not depend on the verify length. None where nothing was
    judged.
    """
    kept = sum(block.accepted for block in request.blocks)
    rejected = sum(block.accepted < block.verify_length - 1 for block in request.blocks)
    return kept / (kept + rejected) if kept + rejected else None
