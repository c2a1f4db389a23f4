"""Every objective against its definition, written out in float64 and left to autograd."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.feedback import HiddenTeacher, Teacher, TopKTeacher
from online.config import ObjectiveSection
from online.objectives import ObjectiveResult, build_objective, objective_loss
from online.packing import PackedBlocks

HIDDEN, VOCAB, NAMED = 8, 23, 6
LENGTHS = [3, 1, 5, 2]  # rows of four blocks
ROWS = sum(LENGTHS)
TOTAL = 40.0  # weight of the batch that the rows are part of


class Case:
    """Blocks, the drafter's states at their rows, and what the teacher says."""

    def __init__(self, kind: str = "hidden", temperature: float = 0.0) -> None:
        torch.manual_seed(0)
        self.states = torch.randn(ROWS, HIDDEN)
        self.lm_head = torch.randn(VOCAB, HIDDEN)
        self.teacher_logits = self.states @ self.lm_head.T
        self.hidden = torch.randn(ROWS, HIDDEN)
        labels = self.teacher_logits.argmax(-1)
        self.hidden[::4] = self.states[::4] + 0.1 * self.hidden[::4]  # some rows are right
        rejected = torch.full((ROWS,), -1)
        rejected[[2, 8]] = (labels[[2, 8]] + 1) % VOCAB
        rejected[3] = labels[3]  # rejected by chance
        named = self.teacher_logits.topk(NAMED)
        self.is_named = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
        self.is_named.scatter_(1, named.indices, True)
        teacher: Teacher = HiddenTeacher(self.states)
        if kind == "top-k":
            logsumexp = self.teacher_logits.logsumexp(-1)
            teacher = TopKTeacher(named.values, named.indices.int(), logsumexp)
        else:
            self.is_named[:] = True
        unused = torch.zeros(0)
        self.blocks = PackedBlocks(
            taps=unused,
            anchors=unused,
            tokens=unused,
            is_random=unused,
            counted=unused,
            labels=labels,
            teacher=teacher,
            weights=torch.rand(ROWS) + 0.1,
            rejected=rejected,
            temperatures=torch.full((ROWS,), temperature),
            lengths=torch.tensor(LENGTHS),
        )

    def run(self, settings: ObjectiveSection, chunk: int = 4) -> tuple[ObjectiveResult, Tensor]:
        hidden = self.hidden.clone().requires_grad_()
        objective = build_objective(settings)
        result = objective_loss(objective, hidden, self.blocks, TOTAL, self.lm_head, chunk)
        (3.0 * result.loss).backward()
        assert hidden.grad is not None
        return result, hidden.grad / 3.0

    def check(self, settings: ObjectiveSection, row_loss: Callable[[int, Tensor], Tensor]) -> None:
        """``row_loss(row, log_p)`` in float64, for every row's loss and gradient."""
        result, gradient = self.run(settings)
        hidden = self.hidden.double().requires_grad_()
        log_p = torch.log_softmax(hidden @ self.lm_head.double().T, dim=-1)
        weights = self.blocks.weights.double() / TOTAL
        loss = torch.stack([weights[r] * row_loss(r, log_p) for r in range(ROWS)]).sum()
        loss.backward()
        torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient.double(), hidden.grad, rtol=1e-4, atol=1e-6)
        cross_entropy = -(weights * log_p.gather(1, self.blocks.labels[:, None])[:, 0]).sum()
        torch.testing.assert_close(result.cross_entropy.double(), cross_entropy.detach())

    def bucketed(self, row: int, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The drafter's and the teacher's probabilities, the tail as one."""
        named = self.is_named[row]
        p, q = log_p[row].exp(), torch.log_softmax(self.teacher_logits[row].double(), -1).exp()
        if bool(named.all()):
            return p, q
        return torch.cat([p[named], p[~named].sum()[None]]), torch.cat(
            [q[named], q[~named].sum()[None]]
        )

    def is_wrong(self, row: int, log_p: Tensor) -> bool:
        return int(log_p[row].argmax()) != int(self.blocks.labels[row])


def kl(left: Tensor, right: Tensor) -> Tensor:
    return (left * (left / right).log()).sum()


def divergence(name: str, p: Tensor, q: Tensor) -> Tensor:
    if name == "forward-kl":
        return kl(q, p)
    if name == "reverse-kl":
        return kl(p, q)
    if name == "osd-jsd":
        return 0.9 * kl(q, p) + 0.1 * kl(p, q)
    return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("clip", "order"), [(1.0, "token"), (1e9, "token"), (0.05, "mean")])
@pytest.mark.parametrize("kind", ["hidden", "top-k"])
def test_adaflash(alpha: float, clip: float, order: str, kind: str) -> None:
    case = Case(kind)
    cap = clip if order == "token" else clip * TOTAL

    def row_loss(row: int, log_p: Tensor) -> Tensor:
        clipped = torch.clamp(kl(*case.bucketed(row, log_p)), max=cap)
        return -alpha * log_p[row, case.blocks.labels[row]] + (1 - alpha) * clipped

    case.check(ObjectiveSection(alpha=alpha, clip=clip, clip_order=order), row_loss)  # type: ignore[arg-type]


def test_adaflash_as_published_clips_what_is_divided_by_the_weight_of_the_batch() -> None:
    """``sum w min(r / N, clip)`` (AdaFlash's code) is ours with ``clip * N`` for each token."""
    case = Case()
    published, _ = case.run(ObjectiveSection(alpha=0.0, clip=0.05, clip_order="mean"))
    log_p = torch.log_softmax(case.hidden @ case.lm_head.T, -1)
    ratios = [kl(*case.bucketed(row, log_p.double())) / TOTAL for row in range(ROWS)]
    expected = sum(
        float(w) * min(float(r), 0.05) for w, r in zip(case.blocks.weights, ratios, strict=True)
    )
    assert float(published.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert any(float(r) > 0.05 for r in ratios)
    assert any(float(r) < 0.05 for r in ratios)


@pytest.mark.parametrize("name", ["forward-kl", "reverse-kl", "jsd", "osd-jsd"])
@pytest.mark.parametrize("kind", ["hidden", "top-k"])
@pytest.mark.parametrize("wrong_only", [True, False])
def test_osd(name: str, kind: str, wrong_only: bool) -> None:
    case = Case(kind)
    seen: list[bool] = []

    def row_loss(row: int, log_p: Tensor) -> Tensor:
        counts = not wrong_only or case.is_wrong(row, log_p)
        seen.append(counts)
        return divergence(name, *case.bucketed(row, log_p)) * counts

    case.check(ObjectiveSection(kind="osd", divergence=name, wrong_only=wrong_only), row_loss)  # type: ignore[arg-type]
    assert any(seen)
    assert all(seen) != wrong_only


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "temperature"), [("hidden", 0.0), ("hidden", 0.7), ("top-k", 0.7)]
)
def test_survival(smoothing: float, kind: str, temperature: float) -> None:
    case = Case(kind, temperature)
    case.blocks = replace(case.blocks, weights=torch.ones(ROWS))

    def chance(row: int, log_p: Tensor) -> Tensor:
        if temperature == 0:
            return log_p[row, case.blocks.labels[row]].exp()
        logits = (case.teacher_logits[row].double() / temperature).masked_fill(
            ~case.is_named[row], float("-inf")
        )
        return (log_p[row].exp() * logits.softmax(-1)).sum()

    def row_loss(row: int, log_p: Tensor) -> Tensor:
        start = sum(LENGTHS[: _block_of(row)])
        end = start + LENGTHS[_block_of(row)]
        smooth = [
            smoothing + (1 - smoothing) * chance(r, log_p).detach() for r in range(start, end)
        ]
        survival = torch.stack(smooth).cumprod(0)
        return -survival[row - start :].sum() * chance(row, log_p).log()

    case.check(ObjectiveSection(kind="survival", smoothing=smoothing), row_loss)


def test_without_smoothing_survival_has_the_gradient_of_the_expected_accepted_drafts() -> None:
    case = Case()
    case.blocks = replace(case.blocks, weights=torch.ones(ROWS))
    _, gradient = case.run(ObjectiveSection(kind="survival", smoothing=0.0))
    hidden = case.hidden.double().requires_grad_()
    log_p = torch.log_softmax(hidden @ case.lm_head.double().T, -1)
    chances = log_p.gather(1, case.blocks.labels[:, None])[:, 0].exp()
    expected = sum(block.cumprod(0).sum() for block in chances.split(LENGTHS))
    (-expected / TOTAL).backward()
    torch.testing.assert_close(gradient.double(), hidden.grad, rtol=1e-4, atol=1e-7)


def test_negatives_push_down_what_was_rejected_unless_it_is_the_targets_own_choice() -> None:
    case = Case()

    def row_loss(row: int, log_p: Tensor) -> Tensor:
        loss = -log_p[row, case.blocks.labels[row]]
        rejected = int(case.blocks.rejected[row])
        if rejected in (-1, int(case.blocks.labels[row])):
            return loss
        return loss - 0.5 * (1 - log_p[row, rejected].exp()).log()

    case.check(ObjectiveSection(alpha=1.0, negatives=0.5), row_loss)


def test_a_sure_negative_does_not_explode() -> None:
    case = Case()
    row = 2
    rejected = case.blocks.rejected[row]
    case.hidden[row] = 50 * case.lm_head[rejected]
    _, gradient = case.run(ObjectiveSection(alpha=1.0, negatives=1.0))
    assert bool(torch.isfinite(gradient).all())


SETTINGS = [
    ObjectiveSection(alpha=0.5, clip=5.0),
    ObjectiveSection(alpha=0.5, clip=0.05, clip_order="mean"),
    ObjectiveSection(kind="osd", divergence="jsd"),
    ObjectiveSection(kind="osd", divergence="osd-jsd", negatives=0.3),
    ObjectiveSection(kind="survival", negatives=0.3),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("chunk", [1, 3, 6, ROWS, 100])
def test_chunks_change_nothing(settings: ObjectiveSection, chunk: int) -> None:
    one, gradient = Case("top-k").run(settings, ROWS)
    many, chunked = Case("top-k").run(settings, chunk)
    for ours, theirs in zip(many, one, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(chunked, gradient)


@pytest.mark.parametrize("settings", SETTINGS[:4])
def test_a_full_top_k_is_the_whole_distribution(
    settings: ObjectiveSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.online.test_objectives.NAMED", VOCAB)
    whole, gradient = Case("hidden").run(settings)
    named, named_gradient = Case("top-k").run(settings)
    torch.testing.assert_close(named.loss, whole.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(named_gradient, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["forward-kl", "reverse-kl", "jsd", "osd-jsd"])
def test_the_teacher_itself_has_no_divergence_and_all_correct(name: str) -> None:
    case = Case()
    case.hidden = case.states.clone()
    settings = ObjectiveSection(kind="osd", divergence=name, wrong_only=False)  # type: ignore[arg-type]
    result, gradient = case.run(settings)
    assert float(result.divergence) == pytest.approx(0.0, abs=1e-6)
    assert bool(result.matches.all())
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS)
def test_far_apart_distributions_stay_finite(settings: ObjectiveSection) -> None:
    """Log ratios of hundreds, as an untrained drafter has."""
    case = Case("top-k")
    case.hidden *= 300
    result, gradient = case.run(settings)
    assert bool(torch.isfinite(gradient).all())
    assert bool(torch.isfinite(torch.stack(result[:4])).all())


def test_bfloat16_matrices_still_compare_probabilities_in_float32() -> None:
    case = Case()
    case.lm_head = case.lm_head.bfloat16()
    result, gradient = case.run(ObjectiveSection(alpha=0.5, clip=1e9))
    assert result.loss.dtype == torch.float32
    logits = F.linear(case.hidden.bfloat16(), case.lm_head).float()
    teacher = F.linear(case.states.bfloat16(), case.lm_head).float()
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)
    rows = F.nll_loss(log_p, case.blocks.labels, reduction="none")
    rows = 0.5 * rows + 0.5 * (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(result.loss, (rows * case.blocks.weights / TOTAL).sum())
    assert gradient.dtype == torch.float32


def test_the_settings_name_the_objective() -> None:
    for settings in SETTINGS:
        again = msgspec.convert(msgspec.to_builtins(settings), ObjectiveSection)
        assert build_objective(again) == build_objective(settings)
    assert ObjectiveSection(kind="survival").position_decay == float("inf")
    assert ObjectiveSection(decay=3.0).position_decay == 3.0


def _block_of(row: int) -> int:
    block = 0
    while row >= sum(LENGTHS[: block + 1]):
        block += 1
    return block
