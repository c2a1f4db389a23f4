"""What is beyond noise."""

import random

import pytest
from scipy import stats

from sglang_patches.online.evidence import (
    EXACTLY_ONE,
    Looks,
    is_a_look,
    ratio_of,
    student_quantile,
)


@pytest.mark.parametrize("freedom", [7, 11, 15, 31, 255])
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 0.9999])
def test_quantiles_are_those_of_student(probability: float, freedom: int) -> None:
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=0.01)


def test_the_error_of_a_ratio_is_the_scatter_of_such_ratios() -> None:
    generator = random.Random(0)

    def sample() -> list[tuple[float, float]]:
        sizes = [generator.uniform(20, 60) for _ in range(40)]
        return [(0.8 * size + generator.gauss(0, 6), size) for size in sizes]

    ratios = [ratio_of(sample()) for _ in range(400)]
    values = [ratio.value for ratio in ratios]
    spread = stats.tstd(values)
    assert sum(values) / len(values) == pytest.approx(0.8, abs=0.005)
    assert sum(ratio.error for ratio in ratios) / len(ratios) == pytest.approx(spread, rel=0.1)


def test_looks_become_rarer() -> None:
    looks = [n for n in range(100) if is_a_look(n)]
    assert looks == [8, 12, 16, 24, 32, 48, 64, 96]


def test_looking_often_is_no_second_chance_to_be_wrong() -> None:
    """At the edge of what is tolerated; a single level of 5 % at each look would fire far more."""
    generator, wrong, runs = random.Random(0), 0, 300
    for _ in range(runs):
        looks, pairs = Looks(error=0.05), []
        for n in range(1, 257):
            base = generator.gauss(40, 4)
            pairs.append((0.9 * base + generator.gauss(0, 4), base))
            if is_a_look(n) and looks.is_lower(ratio_of(pairs), EXACTLY_ONE, 0.9)[0]:
                wrong += 1
                break
    assert wrong / runs <= 0.05
    assert wrong > 0  # the level is used
