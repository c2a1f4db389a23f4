"""AdaFlash's objective on draft blocks (arXiv 2607.19223): hard labels mixed with reverse KL.

For one row with drafter logits z, teacher distribution q and label y = argmax q:

    alpha * CE(z, y) + (1 - alpha) * min(KL(softmax(z) || q), clip)

and the loss is the weighted mean over rows. Upstream divides by the sum of the weights before it
clips, so that its cap depends on how many rows there are, and rounds log q to the drafter's type;
here the cap is per token, before the mean, and everything is float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.feedback import HiddenTeacher, Teacher, TopKTeacher

_TINY = 1e-12


class ObjectiveResult(NamedTuple):
    """Result of `mixed_objective`.

    Attributes:
        loss: scalar with a gradient to ``hidden``.
        cross_entropy, reverse_kl: their weighted sums, before mixing; the latter is clipped.
        correct: weighted sum of the rows whose argmax is the label.
        matches: bool ``[rows]``, which rows those are.
    """

    loss: Tensor
    cross_entropy: Tensor
    reverse_kl: Tensor
    correct: Tensor
    matches: Tensor


def mixed_objective(
    hidden: Tensor,
    labels: Tensor,
    teacher: Teacher,
    weights: Tensor,
    lm_head: Tensor,
    alpha: float,
    clip: float,
    chunk_rows: int = 1024,
) -> ObjectiveResult:
    """Weighted sum of the row losses; give weights that sum to 1 for their mean.

    A `TopKTeacher` is used with its tail as one bucket: exact where the teacher's tail has the
    drafter's shape, a lower bound of the KL otherwise.

    Args:
        hidden: ``[rows, hidden]``, the drafter's final normed states.
        labels: int64 ``[rows]``.
        teacher: with as many rows, on the same device.
        weights: float32 ``[rows]``.
        lm_head: ``[vocab, hidden]``, frozen; its dtype is that of the logits' matrix products.
    """
    return ObjectiveResult(
        *_ChunkedObjective.apply(hidden, labels, teacher, weights, lm_head, alpha, clip, chunk_rows)
    )


class _ChunkedObjective(torch.autograd.Function):
    """Makes the gradient in the forward pass: the logits of a chunk exist once and are not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        teacher: Teacher,
        weights: Tensor,
        lm_head: Tensor,
        alpha: float,
        clip: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        cross_entropy, reverse_kl = torch.zeros(2, device=hidden.device)
        matches = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            label, weight = labels[rows, None], weights[rows, None]  # [chunk, 1]
            logits = F.linear(hidden[rows].to(lm_head.dtype), lm_head)  # [chunk, vocab]
            log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            matches[rows] = log_probs.argmax(-1) == label[:, 0]
            cross_entropy = cross_entropy - (log_probs.gather(1, label) * weight).sum()
            probs = log_probs.exp()
            divergence, slope = _reverse_kl(log_probs, probs, teacher.select(rows), lm_head)
            reverse_kl = reverse_kl + (divergence.clamp(max=clip) * weight).sum()

            # d CE / dz = p - onehot(y); d KL / dz = slope, and nothing where the clip holds.
            slope = slope.mul_((1 - alpha) * (divergence <= clip))
            slope = slope.add_(probs, alpha=alpha)
            slope = slope.scatter_add_(1, label, torch.full_like(weight, -alpha)).mul_(weight)
            gradient[rows] = (slope.to(lm_head.dtype) @ lm_head).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        correct = (matches * weights).sum()
        ctx.mark_non_differentiable(cross_entropy, reverse_kl, correct, matches)
        loss = alpha * cross_entropy + (1 - alpha) * reverse_kl
        return loss, cross_entropy, reverse_kl, correct, matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0], *[None] * 7)


def _reverse_kl(
    log_probs: Tensor, probs: Tensor, teacher: Teacher, lm_head: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(p || q) of each row ``[rows, 1]``, and its gradient by the logits ``[rows, vocab]``.

    With r = log p - log q the divergence is sum p r and its gradient p (r - KL).
    """
    if isinstance(teacher, HiddenTeacher):
        teacher_logits = F.linear(teacher.states.to(lm_head.dtype), lm_head)
        ratio = log_probs - torch.log_softmax(teacher_logits, dim=-1, dtype=torch.float32)
    else:
        ratio = _top_k_ratio(log_probs, probs, teacher)
    divergence = (probs * ratio).sum(-1, keepdim=True)
    return divergence, ratio.sub_(divergence).mul_(probs)


def _top_k_ratio(log_probs: Tensor, probs: Tensor, teacher: TopKTeacher) -> Tensor:
    """log p - log q, with the mean ratio of the tail's total masses for every tail token."""
    ids = teacher.token_ids.long()  # [rows, k]
    teacher_log = teacher.logits.float() - teacher.logsumexp[:, None]
    teacher_tail = 1 - teacher_log.exp().sum(-1, keepdim=True)
    tail = 1 - probs.gather(1, ids).sum(-1, keepdim=True)
    tail_ratio = tail.clamp(min=_TINY).log() - teacher_tail.clamp(min=_TINY).log()
    top_ratio = log_probs.gather(1, ids) - teacher_log
    return tail_ratio.expand_as(log_probs).scatter(1, ids, top_ratio)
