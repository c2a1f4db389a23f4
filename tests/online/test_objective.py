"""The chunked objective against its definition, written out in float64 and left to autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.feedback import HiddenTeacher, Teacher, TopKTeacher
from online.objective import ObjectiveResult, mixed_objective

ROWS, HIDDEN, VOCAB = 11, 8, 23


def reference(
    hidden: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    weights: Tensor,
    lm_head: Tensor,
    alpha: float,
    clip: float,
    buckets: Tensor | None = None,
) -> Tensor:
    """float64; ``buckets`` (bool [rows, vocab]) marks the tokens the teacher names one by one."""
    log_p = torch.log_softmax(hidden.double() @ lm_head.double().T, dim=-1)
    log_q = torch.log_softmax(teacher_logits.double(), dim=-1)
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(labels)):
        cross_entropy = -log_p[row, labels[row]]
        if buckets is None:
            divergence = (log_p[row].exp() * (log_p[row] - log_q[row])).sum()
        else:
            named = buckets[row]
            p, q = log_p[row].exp(), log_q[row].exp()
            divergence = (p[named] * (p[named] / q[named]).log()).sum()
            divergence = divergence + p[~named].sum() * (p[~named].sum() / q[~named].sum()).log()
        clipped = torch.minimum(divergence, torch.tensor(clip, dtype=torch.float64))
        loss = loss + weights[row].double() * (alpha * cross_entropy + (1 - alpha) * clipped)
    return loss


@pytest.fixture
def case() -> dict[str, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(ROWS, HIDDEN)
    lm_head = torch.randn(VOCAB, HIDDEN)
    teacher_logits = states @ lm_head.T
    weights = torch.rand(ROWS)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, requires_grad=True),
        "states": states,
        "lm_head": lm_head,
        "teacher_logits": teacher_logits,
        "labels": teacher_logits.argmax(-1),
        "weights": weights / weights.sum(),
    }


def top_k(teacher_logits: Tensor, k: int) -> TopKTeacher:
    top = teacher_logits.topk(k)
    return TopKTeacher(top.values, top.indices.int(), teacher_logits.logsumexp(-1))


def run(
    case: dict[str, Tensor], teacher: Teacher, alpha: float, clip: float, chunk: int = 4
) -> tuple[ObjectiveResult, Tensor]:
    case["hidden"].grad = None
    result = mixed_objective(
        case["hidden"],
        case["labels"],
        teacher,
        case["weights"],
        case["lm_head"],
        alpha,
        clip,
        chunk,
    )
    (3.0 * result.loss).backward()
    assert case["hidden"].grad is not None
    return result, case["hidden"].grad / 3.0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("clip", [1.0, 4.0, 1e9])
@pytest.mark.parametrize("kind", ["hidden", "top-k"])
def test_loss_and_gradient_are_those_of_the_definition(
    case: dict[str, Tensor], alpha: float, clip: float, kind: str
) -> None:
    buckets = None
    teacher: Teacher = HiddenTeacher(case["states"])
    if kind == "top-k":
        teacher = top_k(case["teacher_logits"], 6)
        buckets = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
        buckets.scatter_(1, teacher.token_ids.long(), True)
    result, gradient = run(case, teacher, alpha, clip)

    hidden = case["hidden"].detach().double().requires_grad_()
    expected = reference(
        hidden,
        case["labels"],
        case["teacher_logits"],
        case["weights"],
        case["lm_head"],
        alpha,
        clip,
        buckets,
    )
    expected.backward()
    torch.testing.assert_close(result.loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), hidden.grad, rtol=1e-4, atol=1e-6)


def test_the_clip_is_per_token_and_comes_before_the_mean(case: dict[str, Tensor]) -> None:
    """Scaling all weights scales the loss: the cap does not depend on how many rows there are."""
    result, _ = run(case, HiddenTeacher(case["states"]), 0.0, 2.0)
    case["weights"] = case["weights"] / 1000
    scaled, _ = run(case, HiddenTeacher(case["states"]), 0.0, 2.0)
    torch.testing.assert_close(scaled.loss * 1000, result.loss)
    assert float(result.reverse_kl) <= 2.0


def test_a_full_top_k_is_the_whole_distribution(case: dict[str, Tensor]) -> None:
    whole, gradient = run(case, HiddenTeacher(case["states"]), 0.2, 1e9)
    named, named_gradient = run(case, top_k(case["teacher_logits"], VOCAB), 0.2, 1e9)
    torch.testing.assert_close(named.loss, whole.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(named_gradient, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, ROWS, 100])
def test_chunks_change_nothing(case: dict[str, Tensor], chunk: int) -> None:
    one, gradient = run(case, top_k(case["teacher_logits"], 5), 0.5, 5.0, ROWS)
    many, chunked = run(case, top_k(case["teacher_logits"], 5), 0.5, 5.0, chunk)
    for ours, theirs in zip(many, one, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(chunked, gradient)


def test_the_teacher_itself_has_no_divergence_and_all_correct(case: dict[str, Tensor]) -> None:
    case["hidden"] = case["states"].clone().requires_grad_()
    result, gradient = run(case, HiddenTeacher(case["states"]), 0.0, 5.0)
    assert float(result.reverse_kl) == pytest.approx(0.0, abs=1e-6)
    assert float(result.correct) == pytest.approx(1.0)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


def test_bfloat16_matrices_still_compare_probabilities_in_float32(case: dict[str, Tensor]) -> None:
    case["lm_head"] = case["lm_head"].bfloat16()
    result, gradient = run(case, HiddenTeacher(case["states"]), 0.5, 1e9)
    assert result.loss.dtype == torch.float32
    logits = F.linear(case["hidden"].bfloat16(), case["lm_head"]).float()
    teacher = F.linear(case["states"].bfloat16(), case["lm_head"]).float()
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    rows = F.nll_loss(log_p, case["labels"], reduction="none")
    rows = 0.5 * rows + 0.5 * (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(result.loss, (rows * case["weights"]).sum().detach())
    assert gradient.dtype == torch.float32
