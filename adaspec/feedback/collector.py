"""From the batches a worker steps through to the records of single requests.

The worker's part is small on purpose: it copies a few whole-batch tensors to the host and hands
over the handles. Slicing by request, numbering and joining steps happen on a thread of our own.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaspec.feedback.record import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    Outcome,
    RollbackCause,
    RollbackRecord,
    Teacher,
    TeacherRows,
    concatenate_teachers,
)
from adaspec.feedback.sender import FeedbackSender

logger = logging.getLogger(__name__)

_MAX_OPEN_REQUESTS = 8192


def _nothing_to_wait_for() -> None:
    """The tensors are on the host already."""


@dataclass(frozen=True)
class PrefillCapture:
    """One prefill batch, restricted to wanted requests.

    Attributes:
        requests: ids, in the order of the rows.
        version: drafter version that wrote the context K/V.
        token_ids: for each request, the sequence up to the end of this slice.
        starts: for each request, position of its first row; it has ``len(token_ids) - start`` rows.
        taps: float ``[all rows, taps * hidden]``, on the host once ``wait`` returns.
        wait: blocks until the copies are complete (``event.synchronize``).
    """

    requests: Sequence[str]
    version: int
    token_ids: Sequence[Sequence[int]]
    starts: Sequence[int]
    taps: Tensor
    wait: Callable[[], None] = _nothing_to_wait_for


@dataclass(frozen=True)
class StepCapture:
    """One verify step, restricted to wanted requests. Tensors are valid once ``wait`` returns.

    Attributes:
        requests: ids, in the order of the rows.
        version: drafter version that drafted.
        temperatures: of each request, 0 for greedy.
        anchors: integer ``[requests]``, position of each anchor (committed tokens with target KV).
        tokens: integer ``[requests, width]``, the verified chains, anchor first.
        verify_lengths: integer ``[requests]``; columns beyond are padding. None: all are ``width``.
        accepted: integer ``[requests]``, accepted drafts.
        bonus: integer ``[requests]``, the target's own token behind them.
        taps: float ``[requests, width, taps * hidden]``.
        teacher: with ``requests * width`` rows, request-major.
        wait: blocks until the copies are complete (``event.synchronize``).
    """

    requests: Sequence[str]
    version: int
    temperatures: Sequence[float]
    anchors: Tensor
    tokens: Tensor
    accepted: Tensor
    bonus: Tensor
    taps: Tensor
    teacher: Teacher
    verify_lengths: Tensor | None = None
    wait: Callable[[], None] = _nothing_to_wait_for


@dataclass(frozen=True)
class EndCapture:
    """A request has left the server; ``length`` counts its delivered tokens, prompt included."""

    request: str
    length: int
    outcome: Outcome = "finished"


@dataclass
class _OpenRequest:
    """Steps of one request that wait to be joined into a record."""

    number: int = 0
    version: int = 0
    start: int = 0
    temperature: float = 0.0
    verify_lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    teacher: list[Teacher] = field(default_factory=list)


class FeedbackCollector:
    """Turns captures into records and offers them to a sender.

    Args:
        sender: where records go; closed with the collector.
        lineage: see `ContextRecord`.
        teacher_rows: send teacher rows of committed tokens only, or of all verified tokens.
        steps_per_record: verify steps of a request that are joined into one record.
        max_pending: captures that may wait; the oldest gives way, and its requests end.
    """

    def __init__(
        self,
        sender: FeedbackSender,
        lineage: str,
        *,
        teacher_rows: TeacherRows = "committed",
        steps_per_record: int = 16,
        max_pending: int = 64,
    ) -> None:
        self._sender = sender
        self._lineage = lineage
        self._teacher_rows: TeacherRows = teacher_rows
        self._steps_per_record = steps_per_record
        self._max_pending = max_pending
        self._pending: deque[PrefillCapture | StepCapture | EndCapture] = deque()
        self._changed = threading.Condition()
        self._open: dict[str, _OpenRequest] = {}
        self._lost: set[str] = set()
        self._dropped: Counter[str] = Counter()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="adaspec-collector", daemon=True)
        self._thread.start()

    def wants(self, request: str) -> bool:
        """Whether to capture this request; costs a dictionary look-up."""
        return self._sender.wants(request)

    def submit(self, capture: PrefillCapture | StepCapture | EndCapture) -> None:
        """Hand over a capture and its tensors, which nobody may write to again; returns at once."""
        with self._changed:
            if len(self._pending) >= self._max_pending and not isinstance(capture, EndCapture):
                self._forget_oldest()
            self._pending.append(capture)
            self._changed.notify()

    def report_rollback(
        self, version: int, restored: int, reason: str, cause: RollbackCause = "acceptance"
    ) -> None:
        """Tell the learner that the server serves ``restored`` in place of ``version``."""
        self._sender.offer(RollbackRecord(self._lineage, version, restored, reason, cause))

    def dropped(self) -> dict[str, int]:
        """Captures that gave way or could not be read, by reason; since start."""
        with self._changed:
            return dict(self._dropped)

    def close(self, timeout: float = 2.0) -> None:
        """Process what is pending, then stop; waits ``timeout`` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        self._sender.close()

    def _forget_oldest(self) -> None:
        for position, capture in enumerate(self._pending):
            if not isinstance(capture, EndCapture):
                del self._pending[position]
                self._lost.update(capture.requests)
                self._dropped["collector-full"] += 1
                return

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                capture = self._pending.popleft()
                lost, self._lost = self._lost, set()
            for request in lost:
                self._open.pop(request, None)
            try:
                self._collect(capture)
            except Exception:
                # Feedback is optional; whatever is wrong with a capture must not end the stream.
                logger.exception("a feedback capture could not be read and was dropped")
                with self._changed:
                    self._dropped["collector-error"] += 1

    def _collect(self, capture: PrefillCapture | StepCapture | EndCapture) -> None:
        if isinstance(capture, EndCapture):
            self._end(capture)
            return
        capture.wait()
        if isinstance(capture, PrefillCapture):
            self._prefill(capture)
        else:
            self._step(capture)

    def _prefill(self, capture: PrefillCapture) -> None:
        row = 0
        for request, tokens, start in zip(
            capture.requests, capture.token_ids, capture.starts, strict=True
        ):
            rows = len(tokens) - start
            # A new id, a later chunk, the restart of a retracted request: all continue the count.
            state = self._flush(request, self._open.pop(request, _OpenRequest()))
            self._sender.offer(
                ContextRecord(
                    self._lineage,
                    request,
                    state.number,
                    capture.version,
                    start,
                    torch.tensor(tokens, dtype=torch.int32),
                    capture.taps[row : row + rows].clone(),
                )
            )
            state.number += 1
            self._open[request] = state
            row += rows
        while len(self._open) > _MAX_OPEN_REQUESTS:
            del self._open[next(iter(self._open))]

    def _step(self, capture: StepCapture) -> None:
        width = capture.tokens.shape[1]
        lengths = [width] * len(capture.requests)
        if capture.verify_lengths is not None:
            lengths = capture.verify_lengths.tolist()
        anchors, chains = capture.anchors.tolist(), capture.tokens.tolist()
        accepted, bonus = capture.accepted.tolist(), capture.bonus.tolist()
        for i, request in enumerate(capture.requests):
            state = self._open.get(request)
            if state is None:  # its prefill was not captured, or a capture was lost
                continue
            if state.verify_lengths and (
                state.version != capture.version
                or anchors[i] != state.start + len(state.token_ids) - 1
            ):
                state = self._open[request] = self._flush(request, state)
            if not state.verify_lengths:
                state.version, state.start = capture.version, anchors[i]
                state.temperature = float(capture.temperatures[i])
                state.token_ids.append(chains[i][0])
            committed = accepted[i] + 1
            rows = committed if self._teacher_rows == "committed" else lengths[i]
            # Copies: a view would hold the pinned memory of the whole batch until the record is
            # made.
            teacher = capture.teacher.select(torch.arange(i * width, i * width + rows))
            state.verify_lengths.append(lengths[i])
            state.accepted.append(accepted[i])
            state.token_ids += [*chains[i][1:committed], bonus[i]]
            state.drafts += chains[i][1 : lengths[i]]
            state.taps.append(capture.taps[i, :committed].clone())
            state.teacher.append(teacher)
            if len(state.verify_lengths) >= self._steps_per_record:
                self._open[request] = self._flush(request, state)

    def _end(self, capture: EndCapture) -> None:
        state = self._open.pop(capture.request, None)
        if state is None:
            return
        state = self._flush(capture.request, state)
        self._sender.offer(
            EndRecord(self._lineage, capture.request, state.number, capture.length, capture.outcome)
        )

    def _flush(self, request: str, state: _OpenRequest) -> _OpenRequest:
        """Offer the joined steps, if there are any, as one record; what remains to be joined."""
        if not state.verify_lengths:
            return state
        self._sender.offer(
            BlockRecord(
                self._lineage,
                request,
                state.number,
                state.version,
                state.start,
                state.temperature,
                tuple(state.verify_lengths),
                tuple(state.accepted),
                torch.tensor(state.token_ids, dtype=torch.int32),
                torch.tensor(state.drafts, dtype=torch.int32),
                torch.cat(state.taps),
                concatenate_teachers(state.teacher),
                self._teacher_rows,
            )
        )
        return _OpenRequest(number=state.number + 1)
