"""All metrics of the worker: told on the scheduler's thread, written once a second on another."""

import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from adaspec.feedback import Endpoint, SenderStats
from sglang_patches.online.metrics.collapse import CollapseMetrics
from sglang_patches.online.metrics.feedback import FeedbackMetrics
from sglang_patches.online.metrics.learner import LearnerMetrics
from sglang_patches.online.metrics.steps import StepMetrics
from sglang_patches.online.metrics.verify import VerifyMetrics
from sglang_patches.online.metrics.versions import VersionMetrics

_INTERVAL_S = 1.0


class WorkerMetrics:
    """Owns the metrics and the thread that writes them.

    Attributes:
        steps: told of steps.
        versions: told of swaps.
        verify: told of the policy of the verify length.
        collapse: told when acceptance collapses, and when it is back.

    Args:
        block_size: tokens of a draft block, the anchor included.
        version: live at the start.
        feedback: totals of the feedback stream; None if there is none.
        status_endpoint: where the learner tells its state; None if there is none.
        registry: where the metrics are registered.
    """

    def __init__(
        self,
        block_size: int,
        version: int,
        feedback: Callable[[], SenderStats] | None,
        status_endpoint: Endpoint | None,
        registry: CollectorRegistry,
    ) -> None:
        self.steps = StepMetrics(block_size, registry)
        self.versions = VersionMetrics(version, registry)
        self.verify = VerifyMetrics(registry)
        self.collapse = CollapseMetrics(registry)
        self._feedback = None if feedback is None else FeedbackMetrics(feedback, registry)
        self._learner = (
            None if status_endpoint is None else LearnerMetrics(status_endpoint, registry)
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaspec-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """Write what is left, then stop; waits ``timeout`` seconds at most."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._write()
        self._write()
        if self._learner is not None:
            self._learner.close()

    def _write(self) -> None:
        self.steps.write()
        self.versions.write()
        self.verify.write()
        if self._feedback is not None:
            self._feedback.write()
        if self._learner is not None:
            self._learner.write()
