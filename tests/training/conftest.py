"""A tiny random target on disk and loaded, and a drafter trained on its answers."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from adaspec.training.collect import collect_turns
from adaspec.training.config import TrainConfig
from adaspec.training.evaluate import AcceptanceReport
from adaspec.training.initialise import drafter_config, new_drafter
from adaspec.training.journal import Journal
from adaspec.training.prompts import Prompt
from adaspec.training.target_model import TargetModel, load_target
from adaspec.training.trainer import Trainer
from adaspec.training.trajectories import Trajectory
from tests.server.tiny_models import write_target
from tests.training.settings import config


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("training") / "target")


@pytest.fixture(scope="session")
def target(target_directory: Path) -> TargetModel:
    return load_target(target_directory, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def tokenizer(target_directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(target_directory)


@pytest.fixture(scope="session")
def trajectories(target: TargetModel, tokenizer: Any) -> list[Trajectory]:
    """Greedy answers to a few prompts."""
    prompts = [Prompt(prompt=f"{'ab' * (i % 4)}{i}?") for i in range(10)]
    return collect_turns(target, tokenizer, prompts, config().generate)


class Training(NamedTuple):
    trainer: Trainer
    log: Path
    report: AcceptanceReport


def make_trainer(
    settings: TrainConfig, target: TargetModel, trajectories: list[Trajectory]
) -> Trainer:
    torch.manual_seed(settings.seed)
    shape = drafter_config(settings.drafter, target, None)
    drafter = new_drafter(settings.drafter, shape, target)
    return Trainer(settings, drafter, target, trajectories, {"heldout": trajectories[:4]})


@pytest.fixture(scope="session")
def trained(
    target: TargetModel, trajectories: list[Trajectory], tmp_path_factory: pytest.TempPathFactory
) -> Training:
    """A drafter that knows some trajectories by heart: a random target has no pattern to learn."""
    settings = config(optim={"name": "muon", "lr": 2e-2, "max_steps": 80}, evaluate_every=10_000)
    trainer = make_trainer(settings, target, trajectories)
    log = tmp_path_factory.mktemp("trained") / "log.jsonl"
    with Journal(log) as journal:
        trainer.evaluate(journal)
        report = trainer.run(journal)["heldout"]
    return Training(trainer, log, report)
