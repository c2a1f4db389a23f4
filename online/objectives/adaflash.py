"""AdaFlash's objective (arXiv 2607.19223): hard labels mixed with clipped reverse KL."""

from dataclasses import dataclass

import torch
from torch import Tensor

from online.objectives.rows import RowLoss, Rows


@dataclass(frozen=True)
class AdaFlash:
    """``alpha * CE(z, y) + (1 - alpha) * min(KL(softmax(z) || q), clip)`` with label y = argmax q.

    As published the divergence is divided by the sum of the batch's weights before it is clipped,
    so that the cap of one token grows with the batch: ``clip_order = "mean"``. Ours clips each
    token before the mean. (Upstream also rounds log q to the drafter's type; here it is float32.)

    Attributes:
        alpha: 0.8 in AdaFlash's pipeline.
        clip: in nats; 0.01 as published, where it is a share of the batch.
        clip_order: ``token`` or ``mean``.
    """

    alpha: float
    clip: float
    clip_order: str = "token"

    def __call__(self, rows: Rows) -> RowLoss:
        """Losses and gradient of each row."""
        clip = self.clip if self.clip_order == "token" else self.clip * rows.total_weight
        divergence, slope = reverse_kl(rows)
        slope.mul_((1 - self.alpha) * (divergence <= clip))  # none where the clip holds
        add_cross_entropy(slope, rows, self.alpha)
        clipped = divergence.clamp(max=clip)
        losses = (1 - self.alpha) * clipped - self.alpha * rows.label_log_probs
        return RowLoss(losses, slope, clipped)


def reverse_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """KL(p || q) of each row ``[rows, 1]`` and its gradient by the logits ``[rows, vocab]``.

    With r = log p - log q the divergence is ``sum p r`` and its gradient ``p (r - KL)``.
    """
    ratio = rows.log_ratio()
    divergence = (rows.probs * ratio).sum(-1, keepdim=True)
    return divergence, ratio.sub_(divergence).mul_(rows.probs)


def add_cross_entropy(slope: Tensor, rows: Rows, weight: float) -> None:
    """Add the gradient of ``weight`` times the cross-entropy, ``p - onehot(y)``, in place."""
    slope.add_(rows.probs, alpha=weight)
    slope.scatter_add_(1, rows.labels, torch.full_like(rows.label_log_probs, -weight))
