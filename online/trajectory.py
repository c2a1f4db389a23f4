"""A finished request as the learner sees it."""

from dataclasses import dataclass

from torch import Tensor

from adaspec.feedback import Teacher


@dataclass(frozen=True)
class DraftedBlock:
    """A block that the server really drafted.

    Attributes:
        anchor: position of its anchor.
        accepted: drafts the target accepted; the teacher's rows up to ``anchor + accepted`` judged
            tokens of this block in their right context.
        verify_length: tokens verified, the anchor included.
        version: drafter version.
        rejected: the draft that the target rejected, or -1 if it kept all that it verified.
    """

    anchor: int
    accepted: int
    verify_length: int
    version: int
    rejected: int = -1


@dataclass(frozen=True)
class Trajectory:
    """Tokens, taps and teacher of one request, by absolute position. On the CPU.

    Attributes:
        request: id.
        tokens: int64 ``[length]``.
        taps: float ``[rows, taps * hidden]``, ``rows <= length``: the last token may not have been
            read by the target.
        prompt_length: position of the first generated token.
        teacher: one row for each position ``prompt_length .. rows - 1``; the row of position ``p``
            predicts the token at ``p + 1``.
        teacher_tokens: int64, the argmax of each teacher row.
        blocks: really drafted blocks, ascending; every anchor is below ``rows``.
        temperature: sampling temperature.
    """

    request: str
    tokens: Tensor
    taps: Tensor
    prompt_length: int
    teacher: Teacher
    teacher_tokens: Tensor
    blocks: tuple[DraftedBlock, ...]
    temperature: float

    @property
    def rows(self) -> int:
        """Positions with taps."""
        return self.taps.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        tokens = self.tokens.nbytes + self.teacher_tokens.nbytes
        return tokens + self.taps.nbytes + self.teacher.nbytes
