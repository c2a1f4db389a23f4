"""What a worker captures, whole batches at a time, and who takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adaspec.feedback.record import Outcome, RollbackCause, Teacher


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


Capture = PrefillCapture | StepCapture | EndCapture


class CaptureSink(Protocol):
    """Takes captures; nothing it does may hold up the caller."""

    def wants(self, request: str) -> bool:
        """Whether to capture this request; costs a dictionary look-up."""

    def submit(self, capture: Capture) -> None:
        """Take a capture and its tensors, which nobody may write to again."""

    def report_rollback(
        self, version: int, restored: int, reason: str, cause: RollbackCause = "acceptance"
    ) -> None:
        """Tell the learner that the server serves ``restored`` in place of ``version``."""
