"""How many drafts a step will accept, by how many it verifies: before the drafts exist."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaspec.verify.step import Floats, Ints
from adaspec.verify.traffic import Traffic

Array = NDArray[np.float64]

_BLOCKS = 16  # of every request that an estimate rests on
_LAST_BLOCKS = 4  # while nothing is drafted: those of the last trial
_MOST_BLOCKS = 512  # of all requests
# An estimate serves for some steps: one block more of each request changes little. So does, in a
# large batch, one request more; in a small one a new request asks for a new estimate.
_STEPS_PER_ESTIMATE, _STEPS_IF_SMALL = 8, 4
_LARGE_BATCH = 16
_ALIKE = 8  # batches that differ by an eighth or less


@dataclass(frozen=True)
class AcceptanceCurve:
    """Accepted drafts per request as a function of drafts verified per request.

    Attributes:
        verified: ``[points]``, rising from 0.
        accepted: ``[points]``, expected.
    """

    verified: Array
    accepted: Array

    @classmethod
    def of(cls, survival: Floats, ragged: bool) -> "AcceptanceCurve":
        """From survival rows ``[samples, batch, drafts]`` of equally likely batches.

        Ragged steps verify the drafts of highest survival, as `adaspec.verify.allocation.allocate`
        does; uniform steps as many of each request.
        """
        samples, batch, drafts = survival.shape
        if ragged:
            ordered = survival.reshape(samples, batch * drafts)
            if batch > 1:  # the rows of one request are in order
                ordered = np.sort(ordered, axis=-1)[:, ::-1]
            gains = ordered.mean(0, dtype=np.float64) / batch
        else:
            gains = survival.mean((0, 1), dtype=np.float64)
        accepted = np.zeros(len(gains) + 1)
        np.cumsum(gains, out=accepted[1:])
        return cls(np.linspace(0, drafts, len(gains) + 1), accepted)

    def at(self, verified: Array) -> Array:
        """Expected accepted drafts per request where so many are verified per request."""
        return np.interp(verified, self.verified, self.accepted)


@dataclass
class _Estimate:
    """Curves, one for each number of drafts read, and what they were made for."""

    curves: tuple[AcceptanceCurve, ...]
    slots: Ints
    drafting: bool
    age: int = 0  # steps

    def serves(self, slots: Ints, drafting: bool, lasting: int) -> bool:
        """Whether it can stand for a step of these requests too."""
        if self.age >= lasting or drafting != self.drafting:
            return False
        if len(slots) < _LARGE_BATCH:
            return slots is self.slots
        return abs(len(slots) - len(self.slots)) * _ALIKE <= len(slots)

    def at(self, verified: Array) -> Array:
        """Expected accepted drafts per request ``[reads, choices]``."""
        return np.array([curve.at(verified) for curve in self.curves])


class Forecast:
    """Expects of the requests in flight what they did lately, as far as requests differ.

    A few blocks of few requests are a noisy sample; where all requests are alike, the blocks of
    all are taken.

    Args:
        traffic: what was seen of them.
        ragged: whether lengths differ within a step.
        reads: ``[reads]``, drafts read of each block; only those can be verified.
    """

    def __init__(self, traffic: Traffic, ragged: bool, reads: Sequence[int]) -> None:
        self._reads = tuple(reads)
        self._traffic = traffic
        self._ragged = ragged
        self._difference = 1.0
        self._own: _Estimate | None = None
        self._all: _Estimate | None = None

    def accepted(self, slots: Ints, verified: Array, drafting: bool) -> Array:
        """Expected accepted drafts per request ``[reads, choices]``.

        Args:
            slots: ``[batch]``, of `Traffic.admit`.
            verified: ``[choices]``, drafts verified per request.
            drafting: whether recent steps drafted; if not, only the newest blocks count.
        """
        batch = len(slots)
        blocks = max(1, min(_BLOCKS if drafting else _LAST_BLOCKS, _MOST_BLOCKS // batch))
        if self._all is None or not self._all.serves(slots, drafting, _STEPS_PER_ESTIMATE):
            self._difference = self._traffic.difference()
            self._all = self._estimate(self._traffic.population(batch, blocks), slots, drafting)
        lasting = _STEPS_PER_ESTIMATE if batch >= _LARGE_BATCH else _STEPS_IF_SMALL
        if self._own is None or not self._own.serves(slots, drafting, lasting):
            rows = self._traffic.recent(slots, blocks, self._difference)
            self._own = self._estimate(rows, slots, drafting)
        self._own.age += 1
        self._all.age += 1
        own, everyone = self._own.at(verified), self._all.at(verified)
        expected: Array = everyone + self._difference * (own - everyone)
        return expected

    def _estimate(self, rows: Floats, slots: Ints, drafting: bool) -> _Estimate:
        curves = (AcceptanceCurve.of(rows[..., :read], self._ragged) for read in self._reads)
        return _Estimate(tuple(curves), slots, drafting)
