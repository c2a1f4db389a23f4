"""The alarm of collapsed acceptance: on every server, with or without a learner.

Counting is done with numbers that have reached the host anyway. When acceptance collapses, a thread
looks for the cause, once; the log, the metrics and the monitor name it until acceptance is back.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from adaspec.errors import AdaSpecError
from sglang_patches.online.collapse import CollapseDetector, Evidence, SeenRequest
from sglang_patches.online.diagnosis import Cause, Checks, Finding, describe, diagnose
from sglang_patches.online.pairing import check_pairing
from sglang_patches.online.weights import sampled_checksums

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from torch import nn

    from sglang_patches.online.metrics import WorkerMetrics
    from sglang_patches.online.served import Served
    from sglang_patches.online.swap import VersionSwapper
    from sglang_patches.worker.worker import AdaSpecWorker

logger = logging.getLogger(__name__)


class CollapseAlarm:
    """Called on the scheduler's thread.

    Args:
        detector: says when acceptance has collapsed, and when it is back.
        checks: what is asked for the cause, on a thread of ours.
        show: told the cause, and None when acceptance is back; from any thread.
    """

    def __init__(
        self, detector: CollapseDetector, checks: Checks, show: Callable[[Cause | None], None]
    ) -> None:
        self._detector = detector
        self._checks = checks
        self._show = show
        self._lock = threading.Lock()
        self._alarms = 0
        self._is_raised = False

    def look(self, reqs: "Sequence[Req]") -> tuple[SeenRequest, ...] | None:
        """The requests of a step that verifies drafts; None if the step is not to be counted."""
        if not self._detector.wants(len(reqs)):
            return None
        return tuple(
            SeenRequest(
                req.rid,
                2 * req.cached_tokens >= len(req.origin_input_ids),
                req.sampling_params.top_k == 1,
            )
            for req in reqs
        )

    def count(
        self,
        seen: Sequence[SeenRequest],
        accepted: Sequence[int],
        lengths: Sequence[int],
        by_base: bool,
    ) -> None:
        """The counts of a step that was looked at have arrived; see `CollapseDetector.count`."""
        if len(seen) != len(accepted):
            return
        evidence = self._detector.count(seen, accepted, lengths, by_base)
        if evidence is not None:
            with self._lock:
                self._alarms += 1
                self._is_raised = True
                number = self._alarms
            threading.Thread(
                target=self._explain, args=(evidence, number), name="adaspec-diagnosis", daemon=True
            ).start()
        elif self._is_raised and not self._detector.collapsed:
            self._end("acceptance is back")

    def drafter_changed(self) -> None:
        """Another version is live."""
        self._detector.drafter_changed()
        if self._is_raised:
            self._end("another version is live, whose acceptance is measured anew")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._is_raised = False
            self._show(None)
        logger.info("the alarm of collapsed acceptance ends: %s", reason)

    def _explain(self, evidence: Evidence, number: int) -> None:
        try:
            finding = diagnose(evidence, self._checks)
        except Exception:
            # Whatever keeps the cause from being found, the collapse must be told.
            logger.exception("the cause of the collapse could not be looked for")
            finding = Finding("unknown", "its cause could not be looked for")
        level = logging.WARNING if finding.cause == "traffic" else logging.ERROR
        logger.log(level, "%s: %s.", describe(evidence), finding.sentence)
        with self._lock:
            if self._is_raised and number == self._alarms:
                self._show(finding.cause)


def start_alarm(
    worker: "AdaSpecWorker",
    start: "Served",
    swapper: "VersionSwapper | None",
    metrics: "WorkerMetrics | None",
) -> CollapseAlarm:
    """The alarm of this server; says what is served otherwise than the drafter was trained.

    Args:
        start: the version the server starts with.
        swapper: owns the drafter's weights; None if they never change.
        metrics: told the cause.
    """
    origin, differences = check_pairing(worker)
    expected = None
    if origin is not None and origin.expected is not None:
        expected = origin.expected.accepted_by_length()
    checks = Checks(
        drafter=_unchanging(worker.draft_model) if swapper is None else _published(swapper),
        target=_unchanging(worker.model_runner.model),
        differences=differences,
        has_origin=origin is not None,
        version=(lambda: start.number) if swapper is None else (lambda: swapper.version),
    )
    show = (lambda cause: None) if metrics is None else metrics.collapse.show
    return CollapseAlarm(CollapseDetector(expected), checks, show)


def _unchanging(model: "nn.Module") -> Callable[[], list[str]]:
    """For a model whose weights must stay what they are now."""
    before = sampled_checksums(model)

    def changed() -> list[str]:
        now = sampled_checksums(model)
        return [name for name, checksum in before.items() if now.get(name) != checksum]

    return changed


def _published(swapper: "VersionSwapper") -> Callable[[], list[str] | None]:
    """For a drafter that is swapped: its weights must be those of the live version's files."""

    def changed() -> list[str] | None:
        try:
            return swapper.differences()
        except AdaSpecError as error:
            logger.warning("the drafter's weights cannot be compared with its files: %s", error)
            return None

    return changed
