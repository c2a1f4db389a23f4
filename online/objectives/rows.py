"""What an objective sees: block positions whose logits exist together, and the teacher's word.

All comparisons are of float32 log-probabilities. A `TopKTeacher` knows its tail as one bucket: the
drafter's tail is compared with it as a whole, so that a divergence is exact where the teacher's
tail has the drafter's shape and a lower bound otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.feedback import HiddenTeacher, Teacher

_TINY = 1e-12


@dataclass(frozen=True)
class Rows:
    """Positions of whole blocks, in order; of each block the first ones, without a gap.

    Attributes:
        log_probs: float32 ``[rows, vocab]``, the drafter's.
        labels: int64 ``[rows, 1]``, the teacher's argmax.
        rejected: int64 ``[rows, 1]``, the draft that the target rejected here; -1 where none was.
        temperatures: float32 ``[rows, 1]``, of the requests; 0 is greedy.
        places: int64 ``[rows]``, 0 for the first draft of a block.
        blocks: int64 ``[rows]``, index of the block, ascending from 0.
        teacher: with as many rows.
        lm_head: ``[vocab, hidden]``, for a teacher of hidden states.
        total_weight: sum of the position weights of the whole batch, before they were normalised.
    """

    log_probs: Tensor
    labels: Tensor
    rejected: Tensor
    temperatures: Tensor
    places: Tensor
    blocks: Tensor
    teacher: Teacher
    lm_head: Tensor
    total_weight: float

    @cached_property
    def probs(self) -> Tensor:
        """The drafter's probabilities: float32 ``[rows, vocab]``."""
        return self.log_probs.exp()

    @cached_property
    def label_log_probs(self) -> Tensor:
        """The drafter's log-probability of each label: float32 ``[rows, 1]``."""
        return self.log_probs.gather(1, self.labels)

    @cached_property
    def is_right(self) -> Tensor:
        """Whether the drafter's argmax is the label: bool ``[rows, 1]``."""
        return self.log_probs.argmax(-1, keepdim=True) == self.labels

    def log_ratio(self) -> Tensor:
        """log p - log q for drafter p and teacher q: float32 ``[rows, vocab]``, the caller's own.

        For a tail token it is the log ratio of the tails' total masses.
        """
        teacher = self.teacher
        if isinstance(teacher, HiddenTeacher):
            return self.log_probs - torch.log_softmax(
                _logits(teacher, self.lm_head), dim=-1, dtype=torch.float32
            )
        ids = teacher.token_ids.long()  # [rows, k]
        teacher_log = teacher.logits.float() - teacher.logsumexp[:, None]
        teacher_tail = 1 - teacher_log.exp().sum(-1, keepdim=True)
        tail = 1 - self.probs.gather(1, ids).sum(-1, keepdim=True)
        tail_ratio = tail.clamp(min=_TINY).log() - teacher_tail.clamp(min=_TINY).log()
        top_ratio = self.log_probs.gather(1, ids) - teacher_log
        return tail_ratio.expand_as(self.log_probs).scatter(1, ids, top_ratio)

    def acceptance(self) -> tuple[Tensor, Tensor]:
        """Chance that the target keeps a draft drawn from the drafter, given the ones before it.

        That is ``sum p(v) t(v)`` with t the target's distribution at the request's temperature, all
        on the label for greedy requests (a draft ``d`` is kept with probability ``t(d)``, see
        `adaspec.acceptance`). Of a `TopKTeacher` the named tokens count.

        Returns:
            ``(chances, slopes)``: float32 ``[rows, 1]``, and their gradient by the logits
            ``[rows, vocab]``, ``p (t - chance)``.
        """
        target = torch.zeros_like(self.log_probs)
        target = target.scatter_(1, self.labels, (self.temperatures == 0).float())
        if bool((self.temperatures > 0).any()):
            target += self._sampled()
        kept = self.probs * target
        chances = kept.sum(-1, keepdim=True)
        return chances, kept.addcmul_(self.probs, chances, value=-1)

    def _sampled(self) -> Tensor:
        """The target's distribution on rows of sampled requests, zero on others."""
        teacher, is_sampled = self.teacher, self.temperatures > 0
        heat = torch.where(is_sampled, self.temperatures, 1)
        if isinstance(teacher, HiddenTeacher):
            logits = _logits(teacher, self.lm_head).float()
            return (logits / heat).softmax(-1) * is_sampled
        named = (teacher.logits.float() / heat).softmax(-1) * is_sampled
        return torch.zeros_like(self.log_probs).scatter_(1, teacher.token_ids.long(), named)


class RowLoss(NamedTuple):
    """What an objective says about `Rows`; not yet weighted.

    Attributes:
        losses: float32 ``[rows, 1]``.
        slopes: float32 ``[rows, vocab]``, the gradient of their sum by the drafter's logits; a
            tensor that the caller may overwrite.
        divergences: float32 ``[rows, 1]``, how far drafter and teacher are apart, for the record;
            zeros where the objective does not ask.
    """

    losses: Tensor
    slopes: Tensor
    divergences: Tensor


Objective = Callable[[Rows], RowLoss]


def _logits(teacher: HiddenTeacher, lm_head: Tensor) -> Tensor:
    return F.linear(teacher.states.to(lm_head.dtype), lm_head)
