"""What the policy of the verify length decides, and what ``goodput`` knows."""

import math
import threading
import time
from collections import Counter as Tally

from prometheus_client import CollectorRegistry

from adaspec.verify import CalibrationReport, CostTable, GoodputState
from sglang_patches.online.metrics.definitions import counter, gauge

_INTERVAL_S = 1.0


class VerifyMetrics:
    """Told on the scheduler's thread; `write` hands over on another.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._decisions: Tally[tuple[str, bool]] = Tally()
        self._state: GoodputState | None = None
        self._next_state = 0.0
        self._steps = counter(
            registry,
            "planned_steps",
            "Decode steps, by what decided their verify length and whether they drafted.",
            "reason",
            "drafted",
        )
        labels = ("kind", "batch", "width")
        self._cost = gauge(
            registry,
            "cost_seconds",
            "Step time that goodput expects at no context, by requests and tokens of each.",
            *labels,
        )
        self._cost_error = gauge(
            registry, "cost_error", "Relative standard deviation of adaspec_cost_seconds.", *labels
        )
        self._cost_samples = gauge(
            registry, "cost_samples", "Measured steps behind adaspec_cost_seconds.", "kind"
        )
        self._cost_noise = gauge(
            registry, "cost_noise", "Relative scatter of a step's time about what is expected."
        )
        classes = ("sampling", "position")
        self._calibration = gauge(
            registry,
            "calibration_error",
            "Expected calibration error of the acceptance goodput predicts.",
            *classes,
        )
        self._log_loss = gauge(
            registry,
            "calibration_log_loss",
            "Mean log-loss of the acceptance goodput predicts, in nats.",
            *classes,
        )
        self._credit = gauge(
            registry,
            "exploration_credit_seconds",
            "Time that goodput may still lose on steps it takes to learn from.",
        )

    def count(self, reason: str, drafted: bool) -> None:
        """A step was planned."""
        with self._lock:
            self._decisions[reason, drafted] += 1

    def wants_state(self) -> bool:
        """Whether it is time for another `show`."""
        now = time.monotonic()
        if now < self._next_state:
            return False
        self._next_state = now + _INTERVAL_S
        return True

    def show(self, state: GoodputState) -> None:
        """What goodput knows now."""
        with self._lock:
            self._state = state

    def write(self) -> None:
        """Hand what is new since the last call to Prometheus."""
        with self._lock:
            decisions, self._decisions = self._decisions, Tally()
            state, self._state = self._state, None
        for (reason, drafted), count in decisions.items():
            self._steps.labels(reason, str(drafted).lower()).inc(count)
        if state is None:
            return
        self._credit.set(state.exploration_credit)
        self._write_cost(state.cost)
        self._write_calibration("greedy", state.greedy)
        self._write_calibration("sampled", state.sampled)

    def _write_cost(self, table: CostTable) -> None:
        for kind, samples in zip(("plain", "drafted"), table.samples, strict=True):
            self._cost_samples.labels(kind).set(samples)
        self._cost_noise.set(table.noise)
        for i, batch in enumerate(table.batches):
            self._cost.labels("plain", batch, 1).set(table.plain[i])
            self._cost_error.labels("plain", batch, 1).set(table.plain_error[i])
            for j, width in enumerate(table.widths):
                self._cost.labels("drafted", batch, width).set(table.drafted[i, j])
                self._cost_error.labels("drafted", batch, width).set(table.drafted_error[i, j])

    def _write_calibration(self, sampling: str, report: CalibrationReport) -> None:
        pairs = zip(report.ece.tolist(), report.log_loss.tolist(), strict=True)
        for position, (error, loss) in enumerate(pairs, start=1):
            if not math.isnan(error):
                self._calibration.labels(sampling, position).set(error)
                self._log_loss.labels(sampling, position).set(loss)
