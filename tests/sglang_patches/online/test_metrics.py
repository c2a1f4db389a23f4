"""The numbers that Prometheus is given."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, Histogram

from adaspec.config import GoodputConfig
from adaspec.feedback import Channel, SenderStats, open_channel
from adaspec.verify import GoodputPolicy, StepLoad, StepOutcome, VerifyShapes
from adaspec.versions import GateVerdict, Interval, LearnerStatus, StatusPublisher
from sglang_patches.online.evidence import Ratio
from sglang_patches.online.metrics import WorkerMetrics
from sglang_patches.online.metrics.definitions import histogram, observe_many
from sglang_patches.online.metrics.steps import Load
from sglang_patches.worker.clock import StepClock

Value = Callable[..., float | None]
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


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
def channel(tmp_path: Path) -> Channel:
    return open_channel(tmp_path / "channel")


@pytest.fixture
def metrics(
    stream: Stream, registry: CollectorRegistry, channel: Channel
) -> Iterator[WorkerMetrics]:
    running = WorkerMetrics(8, 5, stream.stats, channel.status, registry)
    yield running
    running.close()


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    return lambda name, **labels: registry.get_sample_value(f"adaspec_{name}", labels)


def test_steps_are_counted_by_version_and_position(metrics: WorkerMetrics, value: Value) -> None:
    metrics.steps.count(0, [4, 4, 4], [0, 2, 3], drafted=True)
    metrics.steps.count(1, [4], [1], drafted=True)
    metrics.steps.count(1, [1, 1], [0, 0], drafted=False)
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


def test_accepted_lengths_are_a_distribution(metrics: WorkerMetrics, value: Value) -> None:
    metrics.steps.count(3, [8, 8, 4, 8], [0, 2, 2, 7], drafted=True)
    metrics.steps.count(3, [1], [0], drafted=False)  # nothing could be accepted
    metrics.close()
    bounds = ("0.0", "1.0", "2.0", "6.0", "7.0")
    cumulated = [value("accepted_length_bucket", version="3", le=bound) for bound in bounds]
    assert cumulated == [1, 1, 3, 3, 4]
    assert value("accepted_length_sum", version="3") == 11
    assert value("accepted_length_count", version="3") == 4


def test_many_observations_in_one_equal_single_ones() -> None:
    def observed(observe: Callable[[Histogram, float, int], None]) -> list[tuple[str, float]]:
        registry = CollectorRegistry()
        child = histogram(registry, "h", "", "version", buckets=range(4)).labels(1)
        for length, count in ((0, 3), (2, 1), (3, 5), (9, 2)):
            observe(child, length, count)
        samples = next(iter(registry.collect())).samples
        return [(f"{s.name}{s.labels}", s.value) for s in samples if "created" not in s.name]

    def one_by_one(child: Histogram, length: float, count: int) -> None:
        for _ in range(count):
            child.observe(length)

    assert observed(observe_many) == observed(one_by_one)


def test_only_neighbouring_decode_steps_are_timed() -> None:
    clock = StepClock[Load]()
    timed = []
    for now, load in [
        (1.0, Load(4, 32)),
        (1.5, Load(3, 24)),
        (1.7, None),  # a prefill
        (2.0, Load(5, 40)),
        (9.0, None),
        (9.5, None),
        (9.6, Load(6, 48)),
        (9.8, Load(6, 48)),
    ]:
        clock.start(now)
        if load is not None:
            timed.append(clock.decode(load))
    assert timed[0] is timed[2] is timed[3] is None
    assert timed[1] == (Load(4, 32), pytest.approx(0.5))
    assert timed[4] == (Load(6, 48), pytest.approx(0.2))


def test_step_times_are_sorted_by_size(metrics: WorkerMetrics, value: Value) -> None:
    for batch in (3, 3, 1):
        metrics.steps.start_step()
        metrics.steps.decode_step(batch, 7 * batch)
    metrics.close()
    assert value("step_seconds_count", batch="4", tokens="32") == 2
    seconds = value("step_seconds_sum", batch="4", tokens="32")
    assert seconds is not None
    assert seconds > 0


def test_swaps_and_pauses(metrics: WorkerMetrics, value: Value) -> None:
    assert value("live_version") == 5
    metrics.versions.count_swap(1, rolled_back=False)
    metrics.versions.count_swap(0, rolled_back=True)
    metrics.versions.observe_pause(0.002)
    assert value("live_version") == 0
    assert value("swaps_total", version="1", cause="publish") == 1
    assert value("swaps_total", version="0", cause="rollback") == 1
    assert value("swap_pause_seconds_count") == 1
    assert value("swap_pause_seconds_bucket", le="0.001") == 0
    assert value("swap_pause_seconds_bucket", le="0.003") == 1


def test_the_gain_is_relative(metrics: WorkerMetrics, value: Value) -> None:
    metrics.versions.set_gain(4, Ratio(value=1.25, error=0.03, observations=64))
    assert value("gain_over_base", version="4") == pytest.approx(0.25)
    assert value("gain_over_base_error", version="4") == pytest.approx(0.03)


@dataclass
class Totals:
    """A swapper's."""

    staging_failures: int = 0
    audit_failures: int = 0


def test_refused_versions_and_failed_audits(metrics: WorkerMetrics, value: Value) -> None:
    assert value("refused_versions_total") == 0
    totals = Totals()
    metrics.versions.follow(totals)
    metrics.versions.write()
    totals.staging_failures, totals.audit_failures = 3, 1
    metrics.close()
    assert value("refused_versions_total") == 3
    assert value("audit_failures_total") == 1


def test_feedback_totals_are_repeated(metrics: WorkerMetrics, stream: Stream, value: Value) -> None:
    stream.totals = SenderStats(12, 10, 4096, {"queue-full": 2}, 0, 0)
    metrics.close()
    assert value("feedback_records_total", outcome="sent") == 10
    assert value("feedback_records_total", outcome="queue-full") == 2
    assert value("feedback_bytes_total") == 4096


def test_the_learners_verdicts_are_counted(
    metrics: WorkerMetrics, channel: Channel, value: Value
) -> None:
    publisher = StatusPublisher(channel.status)

    def tell(published: int, kept: int) -> None:
        # Told again until it has arrived: a subscription takes a moment, and is not answered.
        deadline = time.monotonic() + 20
        while value("learner", quantity="kept") != kept:
            assert time.monotonic() < deadline
            publisher.publish(msgspec.structs.replace(STATUS, published=published, kept=kept))
            time.sleep(0.1)

    tell(published=2, kept=5)
    tell(published=3, kept=6)
    tell(published=0, kept=0)  # it has lost its state
    tell(published=1, kept=1)
    publisher.close()
    assert value("gate_verdicts_total", action="publish") == 3 + 1
    assert value("gate_verdicts_total", action="keep") == 6 + 1
    assert value("gate_verdicts_total", action="rollback") == 1
    assert value("learner", quantity="learning_seconds") == 12.5
    assert value("learner", quantity="paused") == 0
    assert value("learner", quantity="resting") == 0
    assert value("learner_trust", expert="1") == 0.75
    assert value("learner", quantity="pinned") == -1
    assert value("gate_committed_per_pass", drafter="candidate") == 3.5
    assert value("gate_committed_per_pass", drafter="base") == 2.0


INTERVAL = Interval(estimate=0.0, low=0.0, high=0.0)
STATUS = LearnerStatus(
    lineage="0" * 16,
    time=0.0,
    process=1,
    activity="training",
    live_version=1,
    sequence=1,
    steps=10,
    skipped_steps=0,
    tokens_seen=100,
    loss=None,
    cross_entropy=None,
    divergence=None,
    accuracy=None,
    trust=(0.25, 0.75),
    learning_seconds=12.5,
    published=0,
    kept=0,
    rolled_back=1,
    failures=0,
    replay_trajectories=0,
    replay_bytes=0,
    held_back=0,
    feedback={},
    verdict=GateVerdict(
        action="publish",
        reason="better",
        incumbent_number=0,
        requests=4,
        candidate=3.5,
        incumbent=2.5,
        base=2.0,
        over_incumbent=INTERVAL,
        over_base=INTERVAL,
        incumbent_over_base=INTERVAL,
        confidence=0.9,
    ),
)


def test_step_metrics_need_neither_feedback_nor_learner(
    registry: CollectorRegistry, value: Value
) -> None:
    metrics = WorkerMetrics(8, 0, None, None, registry)
    metrics.steps.count(0, [8], [4], drafted=True)
    metrics.close()
    assert value("committed_tokens_total", version="0") == 5


def test_what_goodput_knows_can_be_read(metrics: WorkerMetrics, value: Value) -> None:
    shapes = VerifyShapes(block_size=8, max_batch=4, ragged=True, on_host=True)
    policy = GoodputPolicy(GoodputConfig(), shapes, torch.device("cpu"))
    load = StepLoad(("a", "b"), 100, np.zeros(2, dtype=np.bool_))
    for _ in range(16):
        plan = policy.plan(load)
        metrics.verify.count(plan.reason, plan.drafted)
        lengths = np.full(2, 8 if plan.drafted else 1)
        log_probs = np.full((2, 7), -0.1, np.float32)
        accepted = np.array([3, 0])
        seconds = 0.5 if plan.drafted else 0.25
        drafts = (lengths, accepted, log_probs) if plan.drafted else ()
        policy.observe(StepOutcome(plan, int(lengths.sum()), seconds, *drafts))
    assert metrics.verify.wants_state()
    assert not metrics.verify.wants_state()  # once a second
    metrics.verify.show(policy.state())
    metrics.close()
    assert value("planned_steps_total", reason="no cost data", drafted="true") >= 1
    assert value("cost_samples", kind="drafted") >= 8
    of_two = {"kind": "drafted", "batch": "2", "width": "8"}
    assert value("cost_seconds", **of_two) == pytest.approx(0.5, rel=0.1)
    assert 0 < value("cost_error", **of_two) < 0.2
    assert 0 < value("calibration_error", sampling="greedy", position="1") < 1
    assert value("calibration_error", sampling="sampled", position="1") is None


def test_every_metric_is_documented(metrics: WorkerMetrics, registry: CollectorRegistry) -> None:
    rows = re.findall(r"^\| `(adaspec_\w+)` \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.M)
    documented = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }
    registered = {
        (collector._name, collector._type, collector._labelnames)
        for collector in registry._collector_to_names
    }
    assert documented == registered
    assert len(rows) == len(documented)
