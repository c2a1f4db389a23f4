"""A share of time that the planner may spend on itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_STEPS = 16  # between two that are learned from, however dear that is


class Thrift:
    """Says when work that can wait is due: as often as its share of time pays for.

    Every step earns ``share`` of its duration, which the work done since is paid from. Work is due
    when nothing is owed and none is under way, and after `MOST_STEPS` steps at the latest.

    Args:
        share: of the time of all steps.
        clock: seconds, of the work.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._owed = 0.0
        self._steps = 0
        self._is_under_way = False

    def earn(self, seconds: float) -> None:
        """Count a step."""
        self._owed = max(self._owed - self._share * seconds, 0.0)
        self._steps += 1

    def take(self) -> bool:
        """Whether the work may be done now; if so, it is under way until `done`."""
        is_due = self._owed == 0.0 and not self._is_under_way
        if not is_due and self._steps < MOST_STEPS:
            return False
        self._steps = 0
        self._is_under_way = True
        return True

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the ``with`` block as spent."""
        begun = self._clock()
        try:
            yield
        finally:
            self._owed += self._clock() - begun

    def done(self) -> None:
        """What was taken has been done."""
        self._is_under_way = False
