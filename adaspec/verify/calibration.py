"""How far predicted probabilities are from what happens, per block position."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_BINS = 10


@dataclass(frozen=True)
class CalibrationReport:
    """Prequential errors: every prediction was made before its flag was seen.

    Attributes:
        flags: ``[positions]``, effective number of flags (old ones fade).
        acceptance: ``[positions]``, share accepted, of those whose predecessors were.
        log_loss: ``[positions]``, mean of −log p(flag), in nats; NaN without flags.
        ece: ``[positions]``, expected calibration error over ten bins of equal width; NaN without
            flags.
    """

    flags: Array
    acceptance: Array
    log_loss: Array
    ece: Array

    @property
    def mean_ece(self) -> float:
        """Calibration error over all positions, weighted by their flags; NaN without any."""
        seen = self.flags > 0
        return float(np.average(self.ece[seen], weights=self.flags[seen])) if seen.any() else np.nan


class CalibrationMeter:
    """Keeps fading sums per position and bin of predicted probability."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        # [count, sum of predictions, sum of flags] x [positions, bins]
        self._sums = np.zeros((3, positions * _BINS))
        self._loss = np.zeros(positions)

    def fade(self, factor: float) -> None:
        """Multiply the weight of everything seen so far."""
        self._sums *= factor
        self._loss *= factor

    def add(self, predicted: Array, accepted: Array, observed: NDArray[np.bool_]) -> None:
        """Count predictions; all arguments are ``[rows, positions]``."""
        if not observed.any():
            return
        bins = np.minimum((predicted * _BINS).astype(np.int64), _BINS - 1)
        cells = (bins + np.arange(self._positions) * _BINS)[observed]
        size = self._positions * _BINS
        p, y = predicted[observed], accepted[observed]
        self._sums[0] += np.bincount(cells, minlength=size)
        self._sums[1] += np.bincount(cells, weights=p, minlength=size)
        self._sums[2] += np.bincount(cells, weights=y, minlength=size)
        p = np.clip(p, 1e-6, 1 - 1e-6)
        loss = -np.where(y > 0.5, np.log(p), np.log1p(-p))
        self._loss += np.bincount(cells // _BINS, weights=loss, minlength=self._positions)

    def report(self) -> CalibrationReport:
        """The errors so far."""
        count, predicted, accepted = self._sums.reshape(3, self._positions, _BINS)
        flags = count.sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return CalibrationReport(
                flags,
                accepted.sum(-1) / flags,
                self._loss / flags,
                np.abs(predicted - accepted).sum(-1) / flags,
            )
