"""The numbers that Prometheus is given."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from adaspec.feedback import SenderStats, open_channel
from sglang_patches.online.metrics import OnlineMetrics

Value = Callable[..., float | None]


class Stream:
    """A feedback stream whose totals the test sets."""

    def __init__(self) -> None:
        self.totals = SenderStats(0, 0, 0, {}, 0, 0)

    def stats(self) -> SenderStats:
        return self.totals


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(stream: Stream, registry: CollectorRegistry, tmp_path: Path) -> Iterator[OnlineMetrics]:
    channel = open_channel(tmp_path / "channel")
    running = OnlineMetrics(8, 5, stream.stats, channel.status, registry)
    yield running
    running.close()


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    return lambda name, **labels: registry.get_sample_value(f"adaspec_{name}", labels)


def test_steps_are_counted_by_version_and_position(metrics: OnlineMetrics, value: Value) -> None:
    metrics.count_step(0, 4, [0, 2, 3])
    metrics.count_step(1, 4, [1])
    metrics.count_step(1, 1, [0, 0])  # plain steps draft nothing
    metrics.close()
    assert value("target_passes_total", version="0", verify_length="4") == 3
    assert value("target_passes_total", version="1", verify_length="1") == 2
    assert value("committed_tokens_total", version="0") == 1 + 3 + 4
    assert value("committed_tokens_total", version="1") == 2 + 1 + 1
    positions = [value("accepted_tokens_total", version="0", position=str(p)) for p in (1, 2, 3)]
    assert positions == [2, 2, 1]
    assert value("drafted_tokens_total", version="0") == 3 * 7
    assert value("drafted_tokens_total", version="1") == 7
    assert value("verified_tokens_total", version="1") == 3
    assert value("wasted_tokens_total", version="0") == 9 - 5


def test_swaps_and_pauses(metrics: OnlineMetrics, value: Value) -> None:
    assert value("live_version") == 5
    metrics.count_swap(1, rolled_back=False)
    metrics.count_swap(0, rolled_back=True)
    metrics.observe_pause(0.002)
    assert value("live_version") == 0
    assert value("swaps_total", version="1", cause="publish") == 1
    assert value("swaps_total", version="0", cause="rollback") == 1
    assert value("swap_pause_seconds_count") == 1
    assert value("swap_pause_seconds_bucket", le="0.001") == 0
    assert value("swap_pause_seconds_bucket", le="0.003") == 1


def test_feedback_totals_are_repeated(metrics: OnlineMetrics, stream: Stream, value: Value) -> None:
    stream.totals = SenderStats(12, 10, 4096, {"queue-full": 2}, 0, 0)
    metrics.close()
    assert value("feedback_records_total", outcome="sent") == 10
    assert value("feedback_records_total", outcome="queue-full") == 2
    assert value("feedback_bytes_total") == 4096
