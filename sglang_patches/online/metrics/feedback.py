"""What became of the feedback records."""

from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from adaspec.feedback import SenderStats
from sglang_patches.online.metrics.definitions import counter


class FeedbackMetrics:
    """Repeats the totals of the feedback stream.

    Args:
        stats: the totals.
        registry: where the metrics are registered.
    """

    def __init__(self, stats: Callable[[], SenderStats], registry: CollectorRegistry) -> None:
        self._stats = stats
        self._seen: Tally[str] = Tally()
        self._records = counter(
            registry, "feedback_records", "Feedback records, by what became of them.", "outcome"
        )
        self._bytes = counter(registry, "feedback_bytes", "Bytes of the feedback records sent.")

    def write(self) -> None:
        """Hand what has changed since the last call to Prometheus."""
        stats = self._stats()
        totals = Tally({"sent": stats.sent, "bytes": stats.sent_bytes, **stats.dropped})
        for outcome, count in (totals - self._seen).items():
            if outcome == "bytes":
                self._bytes.inc(count)
            else:
                self._records.labels(outcome).inc(count)
        self._seen = totals
