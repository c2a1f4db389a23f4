"""Exponential weights over experts, with a fixed share (Herbster and Warmuth 1998)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Hedge:
    """Which expert to trust, from the losses of each round.

    Cumulative losses decide, not the last one; the fixed share lets an expert that was bad come
    back within rounds when the data change: against the best sequence of experts with m changes the
    regret is of the order of ``m log(K / share) / rate``.

    Args:
        experts: K.
        rate: of a loss in [0, 1].
        share: of the weights that is spread evenly in each round.
    """

    def __init__(self, experts: int, rate: float, share: float) -> None:
        self._rate = rate
        self._share = share
        self.weights: Floats = np.full(experts, 1 / experts)

    def observe(self, losses: Floats) -> None:
        """Take the losses ``[K]`` of one round, each in [0, 1]."""
        # The least loss is subtracted so that nothing underflows however many rounds there are.
        weights = self.weights * np.exp(-self._rate * (losses - losses.min()))
        weights /= weights.sum()
        self.weights = (1 - self._share) * weights + self._share / len(weights)

    def divide(self, expert: int, heirs: Sequence[int]) -> None:
        """Share an expert's weight equally between it and others, which are like it now."""
        self.weights[[*heirs]] = self.weights[expert] = self.weights[expert] / (1 + len(heirs))
        self.weights /= self.weights.sum()

    def reset(self) -> None:
        """Trust all alike again."""
        self.weights = np.full_like(self.weights, 1 / len(self.weights))
