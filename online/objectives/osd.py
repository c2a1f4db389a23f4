"""Online Speculative Decoding's distillation (arXiv 2310.07177): soft, at wrong positions only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from online.objectives.adaflash import reverse_kl
from online.objectives.rows import RowLoss, Rows

_LOG_2 = 0.6931471805599453


@dataclass(frozen=True)
class OSD:
    """A divergence between drafter and teacher where the drafter is wrong.

    Attributes:
        divergence: a key of `DIVERGENCES`; OSD's default is ``forward-kl``.
        wrong_only: as published; False learns from every position.
    """

    divergence: str
    wrong_only: bool = True

    def __call__(self, rows: Rows) -> RowLoss:
        """Losses and gradient of each row."""
        divergence, slope = DIVERGENCES[self.divergence](rows)
        losses = divergence
        if self.wrong_only:
            losses = divergence * ~rows.is_right
            slope.mul_(~rows.is_right)
        return RowLoss(losses, slope, divergence)


def forward_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """KL(q || p) and its gradient by the logits, ``p - q``.

    A tail token's share of q is that of p, since only the tail's mass is known.
    """
    ratio = rows.log_ratio()
    teacher = _teacher_probs(rows, ratio)
    divergence = -(teacher * ratio).sum(-1, keepdim=True)
    return divergence, rows.probs - teacher


def jensen_shannon(rows: Rows) -> tuple[Tensor, Tensor]:
    """``(KL(p || m) + KL(q || m)) / 2`` with m halfway between, and its gradient by the logits.

    By a drafter probability the derivative is ``log(2 p / (p + q)) / 2``, by the logits that, less
    its mean over p, times p.
    """
    ratio = rows.log_ratio()
    teacher = _teacher_probs(rows, ratio)
    # log(2 p / (p + q)) and log(2 q / (p + q)), without overflow for any ratio.
    ours = _LOG_2 + F.logsigmoid(ratio)
    theirs = _LOG_2 + F.logsigmoid(-ratio)
    mean = (rows.probs * ours).sum(-1, keepdim=True)
    divergence = (mean + (teacher * theirs).sum(-1, keepdim=True)) / 2
    return divergence, ours.sub_(mean).mul_(rows.probs).div_(2)


def mixed_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """What OSD's code calls JSD: 0.9 forward and 0.1 reverse KL."""
    forward, forward_slope = forward_kl(rows)
    reverse, reverse_slope = reverse_kl(rows)
    return 0.9 * forward + 0.1 * reverse, forward_slope.mul_(0.9).add_(reverse_slope, alpha=0.1)


DIVERGENCES: Mapping[str, Callable[[Rows], tuple[Tensor, Tensor]]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
    "osd-jsd": mixed_kl,
}


def _teacher_probs(rows: Rows, ratio: Tensor) -> Tensor:
    """The teacher's, its tail shaped like the drafter's: float32 ``[rows, vocab]``."""
    return (rows.log_probs - ratio).exp()
