"""Steps taken for what they teach, paid from a fixed share of time."""

from dataclasses import dataclass
from typing import Literal, get_args

Arm = Literal["plain", "draft", "longer", "doubtful"]

_FIRST_INTERVAL = 16  # steps
_LONGEST_INTERVAL = 512
_BURST = 4  # steps: one alone says little, and the first of a kind after a while is untypical
_MOST_CREDIT_STEPS = 512  # that earn; so a quiet hour is not spent at once


@dataclass
class _Tried:
    last: int = 0
    interval: int = _FIRST_INTERVAL
    left: int = 0  # steps of the running burst


class Exploration:
    """Decides when a step may be spent on something that does not look best.

    Every step earns ``share`` of its expected time; an exploratory step is paid with the time it is
    expected to lose against the best plan. So exploration costs at most ``share`` of all time, and
    the time of two or three steps at first, as far as the expectations hold. What was tried is
    tried again after intervals that double.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = self._most = 0.0
        self._steps = 0
        self._arms: dict[Arm, _Tried] = {arm: _Tried() for arm in get_args(Arm)}

    @property
    def credit(self) -> float:
        """Seconds that may be lost."""
        return self._credit

    def earn(self, seconds: float) -> None:
        """Count a step of which the best plan takes ``seconds``."""
        self._most = self._share * _MOST_CREDIT_STEPS * seconds
        if self._steps == 0:
            self._credit = self._most  # much is to be learned at first
        self._steps += 1
        self._credit = min(self._credit + self._share * seconds, self._most)

    def is_due(self, arm: Arm) -> bool:
        """Whether enough steps have passed to try ``arm`` again."""
        tried = self._arms[arm]
        return tried.left > 0 or self._steps - tried.last >= tried.interval

    def pay(self, arm: Arm, loss: float) -> bool:
        """Try ``arm``, if it is due and its expected loss in seconds can be afforded."""
        tried = self._arms[arm]
        if tried.left == 0:
            # A burst dearer than the most that can be saved up is had for that, and paid off later.
            price = min(_BURST * loss, self._most)
            if not self.is_due(arm) or self._credit <= 0 or self._credit < price:
                return False
            tried.left = _BURST
            tried.interval = min(2 * tried.interval, _LONGEST_INTERVAL)
        tried.left -= 1
        tried.last = self._steps
        self._credit -= max(loss, 0.0)
        return True

    def skip(self, arm: Arm) -> None:
        """A trial of ``arm`` cannot change anything now: ask again later."""
        tried = self._arms[arm]
        tried.last, tried.interval = self._steps, min(2 * tried.interval, _LONGEST_INTERVAL)

    def chosen(self, arm: Arm) -> None:
        """``arm`` is what looks best now: it needs no trial."""
        tried = self._arms[arm]
        tried.last, tried.interval, tried.left = self._steps, _FIRST_INTERVAL, 0

    def restart(self) -> None:
        """Something has changed: try everything soon."""
        for tried in self._arms.values():
            tried.interval = _FIRST_INTERVAL
