"""Percentiles and bootstrap intervals of what a load run measured."""

from collections.abc import Sequence

import numpy as np

BOOTSTRAP_DRAWS = 10_000


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linearly interpolated percentile, or ``None`` of no values."""
    return float(np.percentile(values, percent)) if values else None


def median(values: Sequence[float]) -> float | None:
    """The median, or ``None`` of no values."""
    return percentile(values, 50)


def ratio_of_medians(
    values: Sequence[float], baseline: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of two medians with a percentile bootstrap interval over paired repeats.

    Repeat ``r`` of both was measured close in time, so repeats are resampled as pairs and what
    slows both down alike cancels. With few repeats the interval is coarse.

    Args:
        values: one figure per repeat.
        baseline: the same figure of the baseline, same repeats, same order.
        level: coverage of the interval.
        seed: of the resampling, so that a report can be recomputed.

    Returns:
        The ratio, and the lower and upper end of its interval.
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(f"need paired repeats, got {len(values)} and {len(baseline)}")
    pairs = np.array([values, baseline], dtype=np.float64)  # [2, repeats]
    draws = np.random.default_rng(seed).integers(len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    medians = np.median(pairs[:, draws], axis=-1)  # [2, draws]
    tail = 50 * (1 - level)
    low, high = np.percentile(medians[0] / medians[1], [tail, 100 - tail])
    ratio = np.median(pairs[0]) / np.median(pairs[1])
    return float(ratio), float(low), float(high)
