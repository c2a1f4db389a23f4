"""Live acceptance on trial: a version that commits fewer tokens per pass is given up."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

from adaspec.config import WatchConfig

# Steps joined into one observation, so that neighbouring steps of the same requests, which are
# alike, do not count as independent evidence.
_STEPS = 16
_FEWEST = 8  # observations on either side without which nothing is decided
# The trial is looked at after 8, 16, 32 ... observations and at its end; the error probability is
# shared among so many looks.
_LOOKS = 8


@dataclass(frozen=True)
class Rate:
    """Committed tokens per target pass, a ratio of sums over observations.

    Attributes:
        mean: the ratio.
        variance: of the ratio, from the scatter between observations.
        observations: their number.
        committed: tokens in total.
    """

    mean: float
    variance: float
    observations: int
    committed: int


@dataclass(frozen=True)
class Outcome:
    """The end of a trial.

    Attributes:
        roll_back: the version has to go.
        reason: one sentence with the numbers.
    """

    roll_back: bool
    reason: str


class AcceptanceWatch:
    """Compares a version that was swapped in with the traffic just before.

    Both sides see different requests, so a change of traffic at the moment of the swap counts
    for or against the version; the gate, which replays the same requests, does not share that.
    """

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._baseline = _Window(config.window_tokens)
        self._trial: _Window | None = None
        self._given_up = False
        self._quantile = NormalDist().inv_cdf(1 - (1 - config.confidence) / _LOOKS)

    @property
    def on_trial(self) -> bool:
        """Whether the live version has not proved itself yet."""
        return self._trial is not None

    def swapped(self, rolled_back: bool) -> None:
        """Another version is live; ``rolled_back`` if it is the one of the baseline again."""
        self._trial = None if rolled_back else _Window(self._config.window_tokens)
        self._given_up = False

    def observe(self, committed: int, passes: int) -> Outcome | None:
        """Count a step of the live version; the outcome, when the trial ends with it.

        Args:
            committed: tokens of all requests, bonus tokens included.
            passes: requests in the step.
        """
        if self._given_up:  # its last steps, until the roll-back takes place
            return None
        window = self._trial or self._baseline
        if not window.add(committed, passes) or self._trial is None:
            return None
        before, now = self._baseline.rate(), self._trial.rate()
        ends = now.committed >= self._config.window_tokens
        if min(before.observations, now.observations) >= _FEWEST and (
            ends or now.observations & (now.observations - 1) == 0
        ):
            floor = (1 - self._config.max_fall) * before.mean
            error = math.sqrt(now.variance + (1 - self._config.max_fall) ** 2 * before.variance)
            if now.mean + self._quantile * error < floor:
                self._trial, self._given_up = None, True
                return Outcome(True, _describe(before, now, self._quantile * error))
        if not ends:
            return None
        self._baseline, self._trial = self._trial, None
        return Outcome(False, _describe(before, now, math.sqrt(now.variance) * self._quantile))


class _Window:
    """The newest observations that make up a number of committed tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._observations: deque[tuple[int, int]] = deque()  # (committed, passes)
        self._committed = 0
        self._open = (0, 0)
        self._open_steps = 0

    def add(self, committed: int, passes: int) -> bool:
        """Count a step; True if an observation is complete with it."""
        self._open = (self._open[0] + committed, self._open[1] + passes)
        self._open_steps += 1
        if self._open_steps < _STEPS:
            return False
        self._observations.append(self._open)
        self._committed += self._open[0]
        self._open, self._open_steps = (0, 0), 0
        while self._committed - self._observations[0][0] >= self._tokens:
            self._committed -= self._observations.popleft()[0]
        return True

    def rate(self) -> Rate:
        """The rate over the window."""
        n = len(self._observations)
        passes = sum(p for _, p in self._observations)
        if n < 2 or passes == 0:
            return Rate(0.0, math.inf, n, self._committed)
        mean = self._committed / passes
        scatter = sum((c - mean * p) ** 2 for c, p in self._observations)
        return Rate(mean, scatter * n / (n - 1) / passes**2, n, self._committed)


def _describe(before: Rate, now: Rate, half_width: float) -> str:
    then = f"{before.mean:.3f} before" if before.observations >= _FEWEST else "too few before"
    return (
        f"{now.mean:.3f} ± {half_width:.3f} committed tokens per pass over {now.committed} tokens, "
        f"{then}"
    )
