"""An objective of one's own: the example of ``docs/extend.md``, training with one, refusals."""

from pathlib import Path

import msgspec
import pytest
from torch import Tensor
from torch.nn import functional as F

from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from online.config import LearnConfig, ObjectiveSection, load_learn_config
from online.objectives import build_objective
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.test_objectives import Case
from tests.online.test_trainer import CONFIG, batches

WANTED = 7
# Says that one token is always right, whatever the target says.
STUBBORN = f"""
import torch
from online.objectives import RowLoss

def stubborn(settings):
    def objective(rows):
        wanted = torch.full_like(rows.labels, {WANTED})
        slopes = rows.probs.scatter_add(1, wanted, torch.full_like(rows.label_log_probs, -1.0))
        losses = -rows.log_probs.gather(1, wanted)
        return RowLoss(losses, slopes, torch.full_like(losses, settings.alpha))
    return objective
"""


def own(factory: str, **settings: float) -> LearnConfig:
    section = ObjectiveSection(kind="custom", factory=factory, **settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(CONFIG, objective=section)


def test_the_example_of_the_page_is_focal_loss(examples: Path) -> None:
    case = Case()

    def row_loss(row: int, log_p: Tensor) -> Tensor:
        label = log_p[row, case.blocks.labels[row]]
        return -((1 - label.exp()) ** 2) * label

    case.check(load_learn_config(examples / "learn.toml").objective, row_loss)


def test_negatives_are_added_to_the_example_of_the_page(examples: Path) -> None:
    section = load_learn_config(examples / "learn.toml").objective
    both, _ = Case().run(msgspec.structs.replace(section, negatives=0.5))
    alone, _ = Case().run(section)
    assert float(both.loss.detach()) > float(alone.loss.detach())


def test_training_follows_an_objective_of_ones_own(
    own_code: Path,
    drafter: BlockDrafter,
    matrices: TargetMatrices,
    trajectories: list[Trajectory],
) -> None:
    (own_code / "own.py").write_text(STUBBORN)

    def chance() -> float:
        trajectory = trajectories[0]
        anchor = int(trajectory.tokens[6])
        logits = drafter.draft(
            trajectory.taps[:6].float(), anchor, matrices.embedding, matrices.lm_head
        )
        return float(F.softmax(logits[1:], -1)[:, WANTED].min().detach())

    before = chance()
    config = own("own:stubborn", alpha=0.25)
    trainer = Trainer(drafter, matrices, config)
    reports = [trainer.step(batch) for batch in batches(trajectories, 40, config)]
    assert all(report.applied for report in reports)
    assert all(report.divergence == pytest.approx(0.25) for report in reports)
    assert reports[-1].loss < 0.2 * reports[0].loss
    assert before < 0.2
    assert chance() > 0.8


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("None", "type NoneType; let it return a RowLoss"),
        (
            "RowLoss(rows.log_probs[:, 0], rows.probs.clone(), rows.label_log_probs)",
            r"losses of shape \[\d+\] instead of \[\d+, 1\]",
        ),
        (
            "RowLoss(rows.label_log_probs, rows.label_log_probs.clone(), rows.label_log_probs)",
            r"slopes of shape \[\d+, 1\] instead of \[\d+, 23\]",
        ),
        (
            "RowLoss(rows.label_log_probs, rows.probs.clone(), rows.log_probs.sum())",
            r"divergences of shape \[\] instead of \[\d+, 1\]",
        ),
    ],
)
def test_an_answer_of_another_form_is_refused(own_code: Path, answer: str, named: str) -> None:
    (own_code / "own.py").write_text(
        f"from online.objectives import RowLoss\ndef make(settings): return lambda rows: {answer}\n"
    )
    with pytest.raises(AdaSpecError, match=f'"own:make" returned .*{named}'):
        Case().run(own("own:make").objective)


def test_something_that_cannot_be_called_is_no_objective(own_code: Path) -> None:
    (own_code / "own.py").write_text("def make(settings): return settings.alpha\n")
    with pytest.raises(AdaSpecError, match=r"objective\.factory .* type float without __call__"):
        build_objective(own("own:make").objective)


def test_code_that_is_not_there_stops_the_trainer(
    drafter: BlockDrafter, matrices: TargetMatrices
) -> None:
    with pytest.raises(AdaSpecError, match=r"objective\.factory .* no module not_there"):
        Trainer(drafter, matrices, own("not_there:make"))


def test_a_custom_objective_keeps_the_decay_of_positions() -> None:
    assert own("own:make", decay=3.0).objective.position_decay == 3.0
