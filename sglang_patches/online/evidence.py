"""Is one number of committed tokens lower than another beyond noise, however often one looks?"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import NormalDist

# Observations without which nothing is decided.
FEWEST = 8


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums over observations.

    Attributes:
        value: the ratio.
        error: its standard error, from the scatter between observations.
        observations: their number.
    """

    value: float
    error: float
    observations: int


EXACTLY_ONE = Ratio(1.0, 0.0, 1 << 30)


def ratio_of(pairs: Collection[tuple[float, float]]) -> Ratio:
    """``Σx / Σy`` over observations ``(x, y)``, with the standard error of a ratio estimate.

    Cochran, Sampling Techniques, eq. 6.13. With fewer than two observations the error is infinite.
    """
    n = len(pairs)
    total = sum(y for _, y in pairs)
    if n < 2 or total <= 0:
        return Ratio(0.0, math.inf, n)
    value = sum(x for x, _ in pairs) / total
    scatter = sum((x - value * y) ** 2 for x, y in pairs)
    return Ratio(value, math.sqrt(scatter * n / (n - 1)) / total, n)


def is_a_look(observations: int) -> bool:
    """Whether to look after this many observations: 8, 12, 16, 24, 32, 48, …"""
    odd_part = observations // (observations & -observations) if observations else 0
    return observations >= FEWEST and odd_part in (1, 3)


class Looks:
    """An error probability shared among any number of looks, so that looking again is no second
    chance to be wrong: look ``i`` gets ``1 / (i (i + 1))`` of it, which sums to all of it.

    Args:
        error: probability of ever calling something lower that is not.
    """

    def __init__(self, error: float) -> None:
        self._error = error
        self._taken = 0

    def is_lower(self, left: Ratio, right: Ratio, factor: float) -> tuple[bool, float]:
        """Take the next look at whether ``left < factor · right``.

        Returns:
            The answer, and the half width of the interval around ``left - factor · right``.
        """
        self._taken += 1
        share = self._error / (self._taken * (self._taken + 1))
        freedom = min(left.observations, right.observations) - 1
        half_width = student_quantile(1 - share, freedom) * math.hypot(
            left.error, factor * right.error
        )
        return left.value + half_width < factor * right.value, half_width


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t, from the normal one (Abramowitz & Stegun 26.7.5).

    Within 1 % from 7 degrees of freedom up, for probabilities to 0.9999.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, 1)))
