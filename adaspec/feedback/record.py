"""Feedback records: what verification teaches, one record for each slice of a request.

Positions are absolute. The *tap row* of position ``p`` is the concatenated output of the tapped
target layers at token ``p``; its *teacher row* is the target's prediction for ``p + 1``.

A request's committed context is rebuilt from its records in order: context records (prefill) give
tokens and taps, block records (verify steps) extend them, an end record closes the request. A
rollback record belongs to no request.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TeacherRows = Literal["committed", "verified"]
Outcome = Literal["finished", "aborted"]
RollbackCause = Literal["acceptance", "refusal"]


@dataclass(frozen=True)
class HiddenTeacher:
    """The target's last hidden states, after its final norm: the input of its ``lm_head``.

    Attributes:
        states: float ``[rows, hidden]``.
    """

    states: Tensor

    def __len__(self) -> int:
        return self.states.shape[0]

    def select(self, index: slice | Tensor) -> "HiddenTeacher":
        """The chosen rows."""
        return HiddenTeacher(self.states[index])

    def to(self, device: torch.device) -> "HiddenTeacher":
        """The same on another device."""
        return HiddenTeacher(self.states.to(device))

    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, in the constructor's order."""
        return (self.states,)

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return self.states.nbytes


@dataclass(frozen=True)
class TopKTeacher:
    """The largest target logits of each row, before penalties, masks and temperature.

    Attributes:
        logits: float ``[rows, k]``, largest first.
        token_ids: int32 ``[rows, k]``.
        logsumexp: float32 ``[rows]``, over the whole vocabulary.
    """

    logits: Tensor
    token_ids: Tensor
    logsumexp: Tensor

    def __len__(self) -> int:
        return self.logits.shape[0]

    def select(self, index: slice | Tensor) -> "TopKTeacher":
        """The chosen rows."""
        return TopKTeacher(self.logits[index], self.token_ids[index], self.logsumexp[index])

    def to(self, device: torch.device) -> "TopKTeacher":
        """The same on another device."""
        return TopKTeacher(
            self.logits.to(device), self.token_ids.to(device), self.logsumexp.to(device)
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, in the constructor's order."""
        return self.logits, self.token_ids, self.logsumexp

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return self.logits.nbytes + self.token_ids.nbytes + self.logsumexp.nbytes


Teacher = HiddenTeacher | TopKTeacher


def concatenate_teachers(parts: list[Teacher]) -> Teacher:
    """Rows of several teachers of one kind, in order.

    Raises:
        ValueError: if the list is empty or mixes kinds.
    """
    hidden = [part for part in parts if isinstance(part, HiddenTeacher)]
    top_k = [part for part in parts if isinstance(part, TopKTeacher)]
    if hidden and not top_k:
        return HiddenTeacher(torch.cat([part.states for part in hidden]))
    if top_k and not hidden:
        return TopKTeacher(
            torch.cat([part.logits for part in top_k]),
            torch.cat([part.token_ids for part in top_k]),
            torch.cat([part.logsumexp for part in top_k]),
        )
    raise ValueError("a teacher needs at least one part, and parts of one kind only")


@dataclass(frozen=True)
class ContextRecord:
    """A slice of a request's prefill.

    Attributes:
        lineage: `adaspec.versions.lineage_of` of the drafter: version numbers count within it.
        request: the server's request id.
        number: 0 for the first record of a request, then one more each; a gap means a lost record.
        version: drafter version that was live.
        start: position of the first tap row. The first slice of a prefix-cache hit starts behind
            the cached tokens, a later chunk behind the earlier ones.
        token_ids: int32 ``[start + rows]``, the sequence up to the end of the slice.
        taps: float ``[rows, taps * hidden]``.
    """

    lineage: str
    request: str
    number: int
    version: int
    start: int
    token_ids: Tensor
    taps: Tensor


@dataclass(frozen=True)
class BlockRecord:
    """Consecutive verify steps of one request.

    Step ``s`` verifies the chain [anchor, drafts ...] of ``verify_lengths[s]`` tokens, accepts
    ``accepted[s]`` drafts and commits these and the bonus token, which anchors step ``s + 1``. The
    chain rows ``0 .. accepted[s]`` are *committed rows*; the later ones follow a rejected draft, so
    their context is wrong.

    Attributes:
        lineage, request, number, version: as in `ContextRecord`; one version for all steps.
        start: position of the first step's anchor.
        temperature: sampling temperature, 0 for greedy.
        verify_lengths: tokens verified in each step, the anchor included.
        accepted: accepted drafts of each step, at most ``verify_length - 1``.
        token_ids: int32 ``[committed rows + 1]``, tokens at ``start ..``; the last is the bonus
            token of the last step, which the target has not read.
        drafts: int32 ``[sum(verify_lengths) - steps]``, drafted tokens of all steps.
        taps: float ``[committed rows, taps * hidden]``.
        teacher: one row for each committed row, or for each verified row.
        teacher_rows: which of the two.
    """

    lineage: str
    request: str
    number: int
    version: int
    start: int
    temperature: float
    verify_lengths: tuple[int, ...]
    accepted: tuple[int, ...]
    token_ids: Tensor
    drafts: Tensor
    taps: Tensor
    teacher: Teacher
    teacher_rows: TeacherRows

    def right_context(self) -> Tensor:
        """Bool ``[sum(verify_lengths)]``: verified rows before or at the first rejection."""
        rows: list[bool] = []
        for length, accepted in zip(self.verify_lengths, self.accepted, strict=True):
            rows += [row <= accepted for row in range(length)]
        return torch.tensor(rows)

    def committed_teacher(self) -> Teacher:
        """The teacher rows whose context is right: one for each tap row."""
        if self.teacher_rows == "committed":
            return self.teacher
        return self.teacher.select(self.right_context())

    def steps(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """Each step's anchor position, verify length, accepted drafts and drafted tokens."""
        anchor, offset = self.start, 0
        for length, accepted in zip(self.verify_lengths, self.accepted, strict=True):
            yield anchor, length, accepted, self.drafts[offset : offset + length - 1]
            anchor += accepted + 1
            offset += length - 1


@dataclass(frozen=True)
class EndRecord:
    """The end of a request.

    Attributes:
        length: tokens of the finished request, prompt included. Commits beyond it (a verify step
            may run past a stop token) were not delivered.
        outcome: ``aborted`` requests are as good as finished ones up to ``length``.
    """

    lineage: str
    request: str
    number: int
    length: int
    outcome: Outcome


@dataclass(frozen=True)
class RollbackRecord:
    """The server serves another version than the one that was made live.

    Attributes:
        lineage: as in `ContextRecord`.
        version: the version given up.
        restored: the version that serves in its place.
        reason: one sentence, with the numbers.
        cause: ``acceptance``: the version was served, and live acceptance fell; ``refusal``: it
            could not be loaded.
    """

    lineage: str
    version: int
    restored: int
    reason: str
    cause: RollbackCause = "acceptance"


Record = ContextRecord | BlockRecord | EndRecord | RollbackRecord
