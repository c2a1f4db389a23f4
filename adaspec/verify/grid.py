"""Where the cost table has its knots, and how alike times at two of them are expected to be."""

from bisect import bisect_right
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Prior standard deviations of log step time, and length scales in octaves.
LEVEL_STD = 0.5  # of the whole table against its first sample
_SLOPE = 0.25  # per octave of tokens
_ALONG_TOKENS, _TOKEN_SCALE = 0.15, 1.5
_ALONG_BATCH, _BATCH_SCALE = 0.15, 2.0
_LOCAL, _LOCAL_SCALE = 0.1, 1.0
_ALONE = 0.05  # of a knot by itself: kinks that neighbours know nothing of
_PLAIN, _PLAIN_LOCAL = 0.4, 0.15  # plain against drafted steps
# Prior mean: a step grows with its tokens, between flat and in proportion; a draft pass costs.
_MEAN_SLOPE = 0.25
_MEAN_PLAIN = -0.2


@dataclass(frozen=True)
class Place:
    """A point between knots.

    Attributes:
        knots: indices into the state of the table.
        weights: of their values; they sum to 1.
    """

    knots: tuple[int, ...]
    weights: tuple[float, ...]


class CostGrid:
    """Knots over (batch, tokens per request) for drafted steps, and over batch for plain ones.

    Knot values are logarithms of time. Batches are powers of 2, widths half as far apart. State:
    plain knots ``[batches]``, then drafted knots ``[batches, widths]`` in row-major order.
    """

    def __init__(self, block_size: int, max_batch: int) -> None:
        self.batches = [2**i for i in range((max_batch - 1).bit_length() + 1)]
        half_octaves = {1, block_size}
        half_octaves |= {w for i in range(10) for w in (2**i, 3 * 2**i) if w < block_size}
        self.widths = sorted(half_octaves)
        self.size = len(self.batches) * (1 + len(self.widths))
        self._log_batches = [log2(b) for b in self.batches]
        self._log_widths = [log2(w) for w in self.widths]
        self.log_widths = np.array(self._log_widths)

    def place(self, batch: int, tokens: float, drafted: bool) -> Place:
        """Between which knots a step lies; outside the grid, at its edge."""
        row, up = _between(self._log_batches, log2(batch))
        above = min(row + 1, len(self.batches) - 1)
        if not drafted:
            return Place((row, above), (1 - up, up))
        column, right = _between(self._log_widths, log2(max(tokens / batch, 1.0)))
        beside = min(column + 1, len(self.widths) - 1)
        n, start = len(self.widths), len(self.batches)
        low, high = start + row * n, start + above * n
        return Place(
            (low + column, low + beside, high + column, high + beside),
            ((1 - up) * (1 - right), (1 - up) * right, up * (1 - right), up * right),
        )

    def row(self, batch: int) -> tuple[int, int, float]:
        """Knots of the batch axis around ``batch``: ``(lower, upper, weight of the upper)``."""
        row, up = _between(self._log_batches, log2(batch))
        return row, min(row + 1, len(self.batches) - 1), up

    @property
    def batch_likeness(self) -> Array:
        """How alike the batches of the knots are, ``[batches, batches]``, 1 on the diagonal."""
        return _alike(np.array(self._log_batches), _BATCH_SCALE)

    def prior(self) -> tuple[Array, Array]:
        """Mean ``[size]`` and covariance ``[size, size]`` of log time before any sample."""
        log_batch = np.array(self._log_batches)
        count = len(self.widths)
        a = np.concatenate([log_batch, np.repeat(log_batch, count)])
        c = np.concatenate([log_batch, np.add.outer(log_batch, self.log_widths).ravel()])
        plain = np.arange(self.size) < len(self.batches)

        centred = c - c.mean()
        covariance = (
            LEVEL_STD**2
            + _SLOPE**2 * np.outer(centred, centred)
            + _ALONG_TOKENS**2 * _alike(c, _TOKEN_SCALE)
            + _ALONG_BATCH**2 * _alike(a, _BATCH_SCALE)
            + _LOCAL**2 * _alike(a, _LOCAL_SCALE) * _alike(c, _LOCAL_SCALE)
            + _ALONE**2 * np.eye(self.size)
            + np.outer(plain, plain) * (_PLAIN**2 + _PLAIN_LOCAL**2 * _alike(a, _BATCH_SCALE))
        )
        return _MEAN_SLOPE * centred + _MEAN_PLAIN * plain, covariance


def _alike(x: Array, scale: float) -> Array:
    """Squared-exponential kernel of points ``[n]``: ``[n, n]``, 1 on the diagonal."""
    kernel: Array = np.exp(-0.5 * (np.subtract.outer(x, x) / scale) ** 2)
    return kernel


def _between(knots: list[float], x: float) -> tuple[int, float]:
    """Index of the knot at or below ``x``, and how far ``x`` is on the way to the next."""
    i = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 1)
    if i == len(knots) - 1 or x <= knots[i]:
        return i, 0.0
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])
