"""What the learner says of itself, repeated beside the server's own numbers."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry

from adaspec.feedback import Endpoint
from adaspec.versions import GateVerdict, LearnerStatus, StatusListener
from sglang_patches.online.metrics.definitions import counter, gauge

_QUANTITIES = (
    "steps", "skipped_steps", "tokens_seen", "loss", "accuracy", "learning_seconds", "published",
    "kept", "rolled_back", "failures",
)  # fmt: skip


class LearnerMetrics:
    """Listens to the learner's status stream; the learner may come and go. One thread only.

    Args:
        endpoint: of the stream.
        registry: where the metrics are registered.
    """

    def __init__(self, endpoint: Endpoint, registry: CollectorRegistry) -> None:
        self._listener = StatusListener(endpoint)
        self._decisions_seen: Tally[str] = Tally()
        self._state = gauge(registry, "learner", "The learner's state, as it tells it.", "quantity")
        self._trust = gauge(
            registry,
            "learner_trust",
            "Weight of each expert of an ensemble; 0 is the frozen base.",
            "expert",
        )
        self._verdicts = counter(
            registry,
            "gate_verdicts",
            "Decisions on candidates, and roll-backs of any origin.",
            "action",
        )
        self._replayed = gauge(
            registry,
            "gate_committed_per_pass",
            "Committed tokens per target pass in the replay of the last verdict.",
            "drafter",
        )

    def write(self) -> None:
        """Hand the newest status to Prometheus, if one has arrived since the last call."""
        status = self._listener.poll()
        if status is None:
            return
        for quantity in _QUANTITIES:
            value = getattr(status, quantity)
            if value is not None:
                self._state.labels(quantity).set(value)
        for activity in ("paused", "resting"):
            self._state.labels(activity).set(status.activity == activity)
        for expert, trust in enumerate(status.trust):
            self._trust.labels(str(expert)).set(trust)
        self._state.labels("pinned").set(-1 if status.pinned is None else status.pinned)
        self._write_decisions(status)
        if status.verdict is not None:
            self._write_verdict(status.verdict)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _write_decisions(self, status: LearnerStatus) -> None:
        totals = Tally(publish=status.published, keep=status.kept, rollback=status.rolled_back)
        for action, count in (totals - self._decisions_seen).items():
            self._verdicts.labels(action).inc(count)
        # A learner that lost its state counts from zero again; so do we.
        self._decisions_seen = totals

    def _write_verdict(self, verdict: GateVerdict) -> None:
        for drafter in ("candidate", "incumbent", "base"):
            self._replayed.labels(drafter).set(getattr(verdict, drafter))
