"""From the batches a worker steps through to the records of single requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaspec.feedback.captures import Capture, EndCapture, PrefillCapture, StepCapture
from adaspec.feedback.record import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    RollbackCause,
    RollbackRecord,
    Teacher,
    TeacherRows,
    concatenate_teachers,
)
from adaspec.feedback.sender import FeedbackSender

_MAX_OPEN_REQUESTS = 8192


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
    """Turns captures into records and offers them to a sender; a `CaptureSink` that works at once.

    Args:
        sender: where records go; closed with the collector.
        lineage: see `ContextRecord`.
        teacher_rows: send teacher rows of committed tokens only, or of all verified tokens.
        steps_per_record: verify steps of a request that are joined into one record.
    """

    def __init__(
        self,
        sender: FeedbackSender,
        lineage: str,
        *,
        teacher_rows: TeacherRows = "committed",
        steps_per_record: int = 16,
    ) -> None:
        self._sender = sender
        self._lineage = lineage
        self._teacher_rows: TeacherRows = teacher_rows
        self._steps_per_record = steps_per_record
        self._open: dict[str, _OpenRequest] = {}

    def wants(self, request: str) -> bool:
        """See `CaptureSink`."""
        return self._sender.wants(request)

    def submit(self, capture: Capture) -> None:
        """See `CaptureSink`; waits for the tensors, and keeps none of them."""
        if isinstance(capture, EndCapture):
            self._end(capture)
            return
        capture.wait()
        if isinstance(capture, PrefillCapture):
            self._prefill(capture)
        else:
            self._step(capture)

    def forget(self, requests: Iterable[str]) -> None:
        """Captures of these requests were lost; what follows of them is ignored."""
        for request in requests:
            self._open.pop(request, None)

    def report_rollback(
        self, version: int, restored: int, reason: str, cause: RollbackCause = "acceptance"
    ) -> None:
        """See `CaptureSink`."""
        self._sender.offer(RollbackRecord(self._lineage, version, restored, reason, cause))

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()

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
            # Copies: a view would hold the memory of the whole batch until the record is made.
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
