"""The online loop in SGLang's own Prometheus endpoint, labelled by drafter version.

SGLang serves what all its processes write into ``PROMETHEUS_MULTIPROC_DIR``, which it sets with
``--enable-metrics`` before it starts them (``sglang.srt.utils.set_prometheus_multiproc_dir``), so
metrics of ours need no route of their own.
"""

import threading
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from adaspec.feedback import SenderStats
from adaspec.versions import LearnerStatus, StatusListener

_INTERVAL_S = 1.0
_PAUSE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class OnlineMetrics:
    """Counts steps on the scheduler's thread and writes once a second from one of its own.

    Args:
        block_size: tokens of a draft block, the anchor included.
        version: live at the start.
        feedback: totals of the feedback stream; None if there is none.
        status_endpoint: where the learner tells its state.
        registry: where the metrics are registered.
    """

    def __init__(
        self,
        block_size: int,
        version: int,
        feedback: Callable[[], SenderStats] | None,
        status_endpoint: str,
        registry: CollectorRegistry,
    ) -> None:
        self._block_size = block_size
        self._feedback = feedback
        self._feedback_seen: Tally[str] = Tally()
        self._status = StatusListener(status_endpoint)
        self._lock = threading.Lock()
        self._steps: Tally[tuple[int, int, int]] = Tally()
        self._define(registry)
        self._live_version.set(version)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaspec-metrics", daemon=True)
        self._thread.start()

    def count_step(self, version: int, width: int, accepted: Sequence[int]) -> None:
        """A verify step of ``width`` tokens per request; accepted drafts of each request."""
        with self._lock:
            self._steps.update((version, width, count) for count in accepted)

    def count_swap(self, version: int, rolled_back: bool) -> None:
        """Another version is live."""
        self._swaps.labels(version, "rollback" if rolled_back else "publish").inc()
        self._live_version.set(version)

    def observe_pause(self, seconds: float) -> None:
        """How long a swap kept the device or the scheduler busy."""
        self._pause.observe(seconds)

    def close(self, timeout: float = 2.0) -> None:
        """Write what is left, then stop; waits ``timeout`` seconds at most."""
        self._stop.set()
        self._thread.join(timeout)

    def _define(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"adaspec_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(
                f"adaspec_{name}",
                help_text,
                labels,
                registry=registry,
                multiprocess_mode="mostrecent",
            )

        self._passes = counter(
            "target_passes", "Verify steps, counted per request.", "version", "verify_length"
        )
        self._committed = counter(
            "committed_tokens", "Tokens committed, bonus tokens included.", "version"
        )
        self._accepted = counter(
            "accepted_tokens", "Drafts accepted at a block position.", "version", "position"
        )
        self._drafted = counter("drafted_tokens", "Tokens drafted.", "version")
        self._verified = counter("verified_tokens", "Drafts verified.", "version")
        self._wasted = counter("wasted_tokens", "Drafts verified and rejected.", "version")
        self._swaps = counter("swaps", "Changes of the live version, by cause.", "version", "cause")
        self._live_version = gauge("live_version", "Drafter version that is served.")
        self._pause = Histogram(
            "adaspec_swap_pause_seconds",
            "Time a swap kept the device or the scheduler busy.",
            buckets=_PAUSE_BUCKETS_S,
            registry=registry,
        )
        self._records = counter("feedback_records", "Feedback records, by what became of them.",
                                "outcome")  # fmt: skip
        self._bytes = counter("feedback_bytes", "Bytes of the feedback records sent.")
        self._learner = gauge("learner", "The learner's state, as it tells it.", "quantity")

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._write()
        self._write()
        self._status.close()

    def _write(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, Tally()
        for (version, width, accepted), requests in steps.items():
            drafted = 0 if width == 1 else self._block_size - 1
            self._passes.labels(version, width).inc(requests)
            self._committed.labels(version).inc((accepted + 1) * requests)
            self._drafted.labels(version).inc(drafted * requests)
            self._verified.labels(version).inc((width - 1) * requests)
            self._wasted.labels(version).inc((width - 1 - accepted) * requests)
            for position in range(1, accepted + 1):
                self._accepted.labels(version, position).inc(requests)
        if self._feedback is not None:
            self._write_feedback(self._feedback())
        status = self._status.poll()
        if status is not None:
            self._write_learner(status)

    def _write_feedback(self, stats: SenderStats) -> None:
        totals = Tally({"sent": stats.sent, "bytes": stats.sent_bytes, **stats.dropped})
        for outcome, count in (totals - self._feedback_seen).items():
            if outcome == "bytes":
                self._bytes.inc(count)
            else:
                self._records.labels(outcome).inc(count)
        self._feedback_seen = totals

    def _write_learner(self, status: LearnerStatus) -> None:
        for quantity in ("steps", "skipped_steps", "tokens_seen", "loss", "accuracy",
                         "learning_seconds", "published", "kept", "rolled_back",
                         "failures"):  # fmt: skip
            value = getattr(status, quantity)
            if value is not None:
                self._learner.labels(quantity).set(value)
