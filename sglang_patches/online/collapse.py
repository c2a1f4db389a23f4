"""When is acceptance so low that something must be wrong?

Evidence comes in windows of at least `_PASSES` passes with drafts, `_REQUESTS` requests and
`_SECONDS`. A window is *below* if, beyond noise,

- ``floor``: fewer than 5 % of the first drafts are accepted, which is no working drafter;
- ``expectation``: greedy requests accept fewer than half of the drafts that the drafter's origin
  promises for verify lengths like theirs;
- ``level``: fewer than half of the first drafts are accepted that used to be.

The first draft is compared with its earlier level, and not the drafts of a pass, because policies
of the verify length change the latter on purpose. A collapse is two windows below in a row. It
ends with two windows in a row that are below in nothing.

**False alarms.** Passes of a request are alike, so a request is one observation, and noise is the
scatter between requests (`ratio_of`), at Student's t with 1 % error. A drafter that is exactly at
a threshold is called below twice in a row in about one pair of windows in 10,000; one at twice the
threshold, which is where a drafter on its own traffic is, needs a deviation of its window's mean
by half of itself twice in a row, which happens only if traffic changes for that long. That is told
as a collapse, too: its cause is then called traffic.

**Delay.** Two windows and what was left of the one in which it began: three times 256 passes, 8
requests or two seconds, whichever takes longest.

Requests that found most of their prompt in the prefix cache are judged on their own as well, so
that they cannot hide behind the others.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from sglang_patches.online.evidence import FEWEST, Ratio, ratio_of, student_quantile

Rule = Literal["floor", "expectation", "level"]

_FLOOR = 0.05
_LEAST_SHARE = 0.5
_ERROR = 0.01
_PASSES = 256
_REQUESTS = FEWEST
_SECONDS = 2.0
_IN_A_ROW = 2
_FEWEST_COMPARED = 4  # requests of a kind, to tell a cause
_IDLE_S = 60.0
_LEVEL_WINDOWS = 32  # whose median is the earlier level
_FEWEST_LEVEL_WINDOWS = 8
# A lower level that has lasted so long is the level: traffic has changed for good.
_NEW_LEVEL_S = 3600.0
# Of a step with more requests than this, the next ones are left out in proportion, so that counting
# takes no more than some ten microseconds a step.
_REQUESTS_A_STEP = 32


class SeenRequest(NamedTuple):
    """A request of a step.

    Attributes:
        cached: it found at least half of its prompt in the prefix cache.
        greedy: it is not sampled.
    """

    rid: str
    cached: bool
    greedy: bool


@dataclass(frozen=True)
class Figures:
    """A window.

    Attributes:
        first: accepted first drafts over passes with drafts.
        fulfilled: accepted drafts of greedy requests over those expected; None if nothing is
            expected, or too few requests are greedy.
        accepted: drafts accepted per pass.
        passes, requests: in it.
    """

    first: Ratio
    fulfilled: Ratio | None
    accepted: float
    passes: int
    requests: int


@dataclass(frozen=True)
class Evidence:
    """What was seen when acceptance collapsed.

    Attributes:
        rule: which limit it is below.
        of_cached: it is that of requests with a cached prefix alone.
        figures: the newest window.
        level: the earlier share of first drafts accepted, or None.
        worked: acceptance was all right before, in this run of the server.
        cached, fresh: requests with and without a cached prefix, meanwhile; None: too few.
        base: steps of control windows meanwhile, which the frozen base drafts; None: too few.
    """

    rule: Rule
    of_cached: bool
    figures: Figures
    level: float | None
    worked: bool
    cached: Figures | None
    fresh: Figures | None
    base: Figures | None


class CollapseDetector:
    """Counts on the scheduler's thread; nothing here waits for anything.

    Args:
        expected: accepted drafts to expect of a pass by its verify length; None: not known.
        clock: seconds.
    """

    def __init__(
        self, expected: Sequence[float] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected = expected
        self._clock = clock
        self._left_out = 0.0
        self._worked = False
        self.collapsed = False
        self._raised_at = 0.0
        self._start_afresh()

    def wants(self, requests: int) -> bool:
        """Whether the next step, of so many requests, is to be counted."""
        if self._left_out >= 1:
            self._left_out -= 1
            return False
        self._left_out += max(requests / _REQUESTS_A_STEP - 1, 0)
        return True

    def drafter_changed(self) -> None:
        """Another version is live: its acceptance is measured anew."""
        self.collapsed = False
        self._start_afresh()

    def count(
        self,
        requests: Sequence[SeenRequest],
        accepted: Sequence[int],
        lengths: Sequence[int],
        by_base: bool = False,
    ) -> Evidence | None:
        """Count a step with drafts.

        Args:
            accepted: drafts accepted of each request.
            lengths: tokens verified of each request.
            by_base: it was drafted by the frozen base, in a control window.

        Returns:
            What is seen, if acceptance has collapsed with this step. `collapsed` says when it is
            back.
        """
        for request, count, length in zip(requests, accepted, lengths, strict=True):
            if length < 2:
                continue
            expected = 0.0
            if self._expected is not None and request.greedy:
                expected = self._expected[min(length, len(self._expected) - 1)]
            if by_base:
                self._by_base.add(request.rid, count, expected)
                continue
            self._all.open.add(request.rid, count, expected)
            if request.cached:
                self._cached.open.add(request.rid, count, expected)
            (self._with_prefix if request.cached else self._without).add(
                request.rid, count, expected
            )
        now = self._clock()
        closed = [s for s in (self._all, self._cached) if s.close_if_complete(now)]
        return self._judge(closed, now) if closed else None

    def _judge(self, closed: list["_Series"], now: float) -> Evidence | None:
        self._worked = self._worked or self._all.is_fine
        evidence = None
        if self.collapsed:
            if now - self._raised_at > _NEW_LEVEL_S:
                for series in (self._all, self._cached):
                    series.levels.clear()
            self.collapsed = not (
                self._all.is_fine and (self._cached.is_fine or self._cached.is_idle(now))
            )
        else:
            below = next((series for series in closed if series.rule is not None), None)
            if below is not None:
                self.collapsed, self._raised_at = True, now
                evidence = self._evidence(below)
        if not (self._all.below or self._cached.below):
            self._forget_comparison()
        return evidence

    def _evidence(self, below: "_Series") -> Evidence:
        assert below.rule is not None
        assert below.figures is not None
        return Evidence(
            below.rule,
            below is self._cached,
            below.figures,
            below.level,
            self._worked,
            self._with_prefix.figures(_FEWEST_COMPARED),
            self._without.figures(_FEWEST_COMPARED),
            self._by_base.figures(_FEWEST_COMPARED),
        )

    def _start_afresh(self) -> None:
        now = self._clock()
        self._all, self._cached = _Series(now), _Series(now)
        self._forget_comparison()

    def _forget_comparison(self) -> None:
        """Start to compare kinds of steps anew, with the windows that begin now."""
        self._with_prefix, self._without, self._by_base = _Tally(), _Tally(), _Tally()


class _Tally:
    """Passes by request.

    Attributes:
        passes: in all.
    """

    def __init__(self) -> None:
        self.passes = 0
        # Of each request: passes, first drafts accepted, drafts accepted, those of passes with an
        # expectation, and that.
        self._rows: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rid: str, accepted: int, expected: float) -> None:
        """Count a pass of a request; ``expected`` is 0 if nothing is."""
        row = self._rows.get(rid)
        if row is None:
            row = self._rows[rid] = [0, 0, 0, 0, 0]
        row[0] += 1
        row[1] += accepted > 0
        row[2] += accepted
        if expected:
            row[3] += accepted
            row[4] += expected
        self.passes += 1

    def figures(self, fewest: int) -> Figures | None:
        """What was counted; None of fewer requests than ``fewest``."""
        rows = list(self._rows.values())
        if len(rows) < fewest:
            return None
        promised = [(row[3], row[4]) for row in rows if row[4]]
        return Figures(
            ratio_of([(row[1], row[0]) for row in rows]),
            ratio_of(promised) if len(promised) >= FEWEST else None,
            sum(row[2] for row in rows) / self.passes,
            self.passes,
            len(rows),
        )


class _Series:
    """Windows of one kind of requests, one after the other.

    Attributes:
        open: the window that is being filled.
        figures: of the newest complete window.
        below: how many of the newest windows in a row were below something.
        rule: what two or more in a row were below; None: nothing.
        is_fine: the two newest were below in nothing.
        levels: shares of first drafts accepted in windows that were fine.
    """

    def __init__(self, now: float) -> None:
        self.open = _Tally()
        self.figures: Figures | None = None
        self.below = 0
        self.rule: Rule | None = None
        self.is_fine = False
        self.levels: deque[float] = deque(maxlen=_LEVEL_WINDOWS)
        self._fine = 0
        self._opened = now

    @property
    def level(self) -> float | None:
        """Share of first drafts accepted in earlier windows."""
        return median(self.levels) if len(self.levels) >= _FEWEST_LEVEL_WINDOWS else None

    def close_if_complete(self, now: float) -> bool:
        """Judge the open window if there is enough in it; whether there was."""
        if self.open.passes < _PASSES or now - self._opened < _SECONDS:
            return False
        figures = self.open.figures(_REQUESTS)
        if figures is None:
            return False
        below, fine = _judge(figures, self.level)
        if fine:
            self.levels.append(figures.first.value)
        self.below = self.below + 1 if below is not None else 0
        self._fine = self._fine + 1 if fine else 0
        self.rule = below if self.below >= _IN_A_ROW else None
        self.is_fine = self._fine >= _IN_A_ROW
        self.figures, self.open, self._opened = figures, _Tally(), now
        return True

    def is_idle(self, now: float) -> bool:
        """There are hardly any requests to judge."""
        return now - self._opened > _IDLE_S and len(self.open) < _REQUESTS


def _judge(figures: Figures, level: float | None) -> tuple[Rule | None, bool]:
    """What the window is below beyond noise, and whether it is below in nothing at all."""
    limits: list[tuple[Rule, Ratio, float]] = [("floor", figures.first, _FLOOR)]
    if figures.fulfilled is not None:
        limits.append(("expectation", figures.fulfilled, _LEAST_SHARE))
    if level is not None:
        limits.append(("level", figures.first, _LEAST_SHARE * level))
    below = next((rule for rule, ratio, limit in limits if is_below(ratio, limit)), None)
    return below, all(ratio.value >= limit for _, ratio, limit in limits)


def is_below(ratio: Ratio, limit: float) -> bool:
    """Whether a ratio over at least 8 requests is below a limit beyond noise."""
    return ratio.value + student_quantile(1 - _ERROR, ratio.observations - 1) * ratio.error < limit
