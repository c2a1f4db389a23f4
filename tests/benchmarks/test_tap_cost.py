"""The cost of the tap: figures from steps whose times are known."""

import numpy as np
import pytest

from adaspec.errors import AdaSpecError
from benchmarks.online.blinking_tap import is_open
from benchmarks.online.tap_cost import tap_cost


def steps(
    seconds: float, window_s: float, shut_s: float, open_s: float, drift: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Full steps of 4 requests; all of them take longer by and by."""
    times, now = [], 1000.0
    while now < 1000.0 + seconds:
        times.append(now)
        slow = 1 + drift * (now - 1000.0)
        now += slow * (open_s if is_open(int(now / window_s)) else shut_s)
    return np.array(times), np.full(len(times), 4.0)


def test_a_slower_step_is_seen_under_drift() -> None:
    times, requests = steps(60.0, 0.5, shut_s=0.010, open_s=0.011, drift=0.02)
    cost = tap_cost(times, requests, 0.5, 4)
    assert cost.step.estimate == pytest.approx(1.1, rel=0.01)
    assert cost.throughput.estimate == pytest.approx(1 / 1.1, rel=0.02)
    assert cost.throughput.low <= cost.throughput.estimate <= cost.throughput.high < 1
    assert cost.pairs > 50


def test_equal_steps_cost_nothing() -> None:
    cost = tap_cost(*steps(60.0, 0.5, shut_s=0.010, open_s=0.010), 0.5, 4)
    assert cost.throughput.estimate == pytest.approx(1.0, abs=0.005)
    assert cost.shut_step_s == pytest.approx(0.010)


def test_windows_without_full_steps_are_left_out() -> None:
    times, requests = steps(20.0, 0.5, shut_s=0.010, open_s=0.012)
    requests[times > 1010.0] = 3.0
    assert tap_cost(times, requests, 0.5, 4).pairs <= 10
    with pytest.raises(AdaSpecError, match="full load"):
        tap_cost(times, requests, 0.5, 8)
