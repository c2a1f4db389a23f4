"""Training learns, resumes exactly, and refuses a state that is not its own."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaspec.drafters.checkpoint import load_drafter, save_drafter
from adaspec.drafters.config import DrafterConfig
from adaspec.errors import AdaSpecError
from adaspec.training.initialise import drafter_config, new_drafter
from adaspec.training.journal import Journal
from adaspec.training.target_model import TargetModel
from adaspec.training.trainer import load_state, save_state
from adaspec.training.trajectories import Trajectory
from tests.training.conftest import Training, make_trainer
from tests.training.settings import config


class StopHereError(Exception):
    pass


def events(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def same(first: Any, second: Any) -> bool:
    """Bit for bit equality of nested states."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def test_training_raises_acceptance(trained: Training) -> None:
    held = [event for event in events(trained.log) if event["kind"] == "heldout"]
    before, after = held[0], held[-1]
    assert (before["step"], after["step"]) == (0, 80)
    assert before["committed_per_pass"] < 1.2
    assert after["committed_per_pass"] == trained.report.committed_per_pass > 2.0
    losses = [event["loss"] for event in events(trained.log) if event["kind"] == "train"]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])


def test_the_length_head_learns_with_the_drafter(
    target: TargetModel, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    settings = config(
        drafter={"length_head_width": 16},
        optim={"name": "muon", "lr": 2e-2, "max_steps": 240},
        evaluate_every=10_000,
    )
    trainer = make_trainer(settings, target, trajectories)
    with Journal(tmp_path / "log.jsonl") as journal:
        trainer.run(journal)
    errors = [e["length_error"] for e in events(tmp_path / "log.jsonl") if e["kind"] == "train"]
    assert np.mean(errors[-10:]) < 0.02  # of a block, squared
    assert np.mean(errors[-10:]) < 0.3 * np.mean(errors[:5])
    save_drafter(trainer.drafter, tmp_path / "drafter", torch.float32)
    head = load_drafter(tmp_path / "drafter").thresh_head_two_model
    assert head is not None
    assert trainer.drafter.thresh_head_two_model is not None
    assert same(head.state_dict(), trainer.drafter.thresh_head_two_model.state_dict())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    name: str, target: TargetModel, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    settings = config(optim={"name": name, "max_steps": 7})

    def run(directory: Path, stop_at: float) -> dict[str, Any]:
        directory.mkdir(exist_ok=True)
        trainer = make_trainer(settings, target, trajectories)
        checkpoint = directory / "checkpoint.pt"
        if checkpoint.exists():
            trainer.restore(load_state(checkpoint))

        def interrupt(share: float, text: str) -> None:
            if trainer.step == stop_at:
                raise StopHereError

        with Journal(directory / "log.jsonl", trainer.step) as journal:
            trainer.run(journal, checkpoint, interrupt)
        return trainer.state()

    whole = run(tmp_path / "whole", stop_at=np.inf)
    with pytest.raises(StopHereError):
        run(tmp_path / "parts", stop_at=5)
    assert load_state(tmp_path / "parts" / "checkpoint.pt")["step"] == 3
    parts = run(tmp_path / "parts", stop_at=np.inf)
    whole.pop("elapsed")
    parts.pop("elapsed")
    assert same(whole, parts)
    assert events(tmp_path / "whole" / "log.jsonl") == events(tmp_path / "parts" / "log.jsonl")


def test_a_state_of_another_run_is_refused(
    target: TargetModel, trajectories: list[Trajectory]
) -> None:
    state = make_trainer(config(), target, trajectories).state()
    other_settings = make_trainer(config(seed=1), target, trajectories)
    other_data = make_trainer(config(), target, trajectories[:-1])
    for trainer in (other_settings, other_data):
        with pytest.raises(AdaSpecError, match="another configuration or other trajectories"):
            trainer.restore(state)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_state(path, {"step": 3})
    assert load_state(path) == {"step": 3}
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(AdaSpecError, match=r"checkpoint\.pt cannot be read"):
        load_state(path)


def test_the_schedule_may_end_by_the_clock(
    target: TargetModel, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    settings = config(optim={"max_steps": 10_000, "max_seconds": 0.3})
    trainer = make_trainer(settings, target, trajectories)
    with Journal(tmp_path / "log.jsonl") as journal:
        trainer.run(journal)
    assert 0 < trainer.step < 10_000
    rates = [event["lr"] for event in events(tmp_path / "log.jsonl") if event["kind"] == "train"]
    assert rates[-1] < max(rates)


def test_without_a_response_there_is_nothing_to_train_on(target: TargetModel) -> None:
    silent = [Trajectory(np.arange(3, 9, dtype=np.int32), 5, i) for i in range(9)]
    with pytest.raises(AdaSpecError, match="nothing to train on"):
        make_trainer(config(), target, silent)


def test_the_target_is_left_as_it_was(target: TargetModel, trained: Training) -> None:
    assert trained.trainer.target is target
    assert not any(p.requires_grad or p.grad is not None for p in target.decoder.parameters())


def shape_for(target: TargetModel, **drafter: Any) -> DrafterConfig:
    return drafter_config(config(drafter=drafter).drafter, target, None)


def test_layers_can_start_as_those_of_the_target(target: TargetModel) -> None:
    section = config(drafter={"intermediate_size": None, "initialise_from": [2]}).drafter
    drafter = new_drafter(section, drafter_config(section, target, None), target)
    theirs = target.decoder.layers[2].state_dict()
    ours = drafter.layers[0].state_dict()
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert torch.equal(drafter.norm.weight, target.final_norm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initialise_from": [0, 1]}, "2 target layers for 1 drafter layers"),
        ({"initialise_from": [3]}, "layer 3"),
        ({"initialise_from": [0]}, "does not have the drafter's shape"),
        ({"mask_token_id": 512}, "outside the vocabulary"),
        ({"target_layer_ids": [2]}, "can be tapped"),
        ({"target_layer_ids": [1, 0]}, r"use \[0, 1\]"),
        ({"target_layer_ids": [1, 1]}, r"use \[1\]"),
        ({"target_layer_ids": None, "num_taps": 9}, "cannot be spread"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target_is_refused(
    target: TargetModel, changes: dict[str, Any], message: str
) -> None:
    section = config(drafter=changes).drafter
    with pytest.raises(AdaSpecError, match=message):
        new_drafter(section, drafter_config(section, target, None), target)


def test_the_mask_token_is_the_tokenizers_unless_given(target: TargetModel, tokenizer: Any) -> None:
    section = config(drafter={"mask_token_id": None}).drafter
    with pytest.raises(AdaSpecError, match="no mask token"):
        drafter_config(section, target, tokenizer)
    with_mask = copy.deepcopy(tokenizer)
    with_mask.mask_token = "<mask>"
    assert drafter_config(section, target, with_mask).mask_token_id == 2
    assert shape_for(target, mask_token_id=7).mask_token_id == 7
