"""The soak's arithmetic: growth is found where there is some, and only there."""

import numpy as np
import pytest

from benchmarks.soak.readings import Reading, growth


def readings(slope_mib_per_hour: float, seed: int) -> list[Reading]:
    """Of an hour; memory wanders, and one process comes late."""
    rng = np.random.default_rng(seed)
    wander = np.zeros(360)
    for i in range(1, 360):
        wander[i] = 0.9 * wander[i - 1] + rng.normal(0, 2)
    found = []
    for i in range(360):
        size = 500 + slope_mib_per_hour * i / 360 + wander[i] + (200 if i < 60 else 0)
        resident = {"scheduler": int(size * (1 << 20))}
        if i > 100:
            resident["late"] = 1
        found.append(Reading(i * 10.0, resident, {}, 0.0, 0.5, 0))
    return found


@pytest.mark.parametrize("slope", [0.0, 60.0])
def test_growth_is_found_where_there_is_some(slope: float) -> None:
    covered = positive = 0
    for seed in range(20):
        (found,) = growth(readings(slope, seed), warm_up_s=600)  # one process is not always there
        assert found.process == "scheduler"
        assert abs(found.per_hour - slope) < 25
        covered += found.low <= slope <= found.high
        positive += found.low > 0
    assert covered >= 14
    assert positive == 20 if slope else positive <= 4
