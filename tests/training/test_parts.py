"""Configuration, log, schedule, optimisers and batches."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from adaspec.errors import AdaSpecError
from adaspec.training.batches import endless, epoch_batches, pack, pad
from adaspec.training.config import OptimSection, TrainConfig, load_train_config
from adaspec.training.journal import Journal
from adaspec.training.optim import learning_rate, make_optimisers, set_learning_rate
from adaspec.training.trajectories import Trajectory

LENGTHS = [(37 * i) % 90 + 10 for i in range(200)]


def test_a_configuration_file_sets_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("seed = 3\n[drafter]\ntarget_layer_ids = [1, 2]\n[optim]\nname = 'muon'\n")
    config = load_train_config(path)
    assert (config.seed, config.optim.name, config.drafter.target_layer_ids) == (3, "muon", (1, 2))
    assert config.data == TrainConfig().data


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sed = 3", "sed"),
        ("[optim]\nlearning_rate = 1.0", "learning_rate"),
        ("[optim]\nlr = 0.0", r"\$\.optim\.lr"),
        ("[drafter]\nblock_size = 1", r"\$\.drafter\.block_size"),
        ("[data]\nheldout_share = 1.5", r"\$\.data\.heldout_share"),
        ("precision = 'half'", r"\$\.precision"),
        ("seed = ", "train.toml"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(AdaSpecError, match=named):
        load_train_config(path)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(AdaSpecError, match="cannot be read"):
            load_train_config(path)


def test_the_log_of_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Journal(path) as journal:
        for step in range(1, 6):
            journal.write("train", step, loss=float(step))
    with Journal(path, resume_step=3) as journal:
        journal.write("train", 4, loss=40.0)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["step"], e["loss"]) for e in events] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    with Journal(path):
        pass
    assert path.read_text() == ""


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind":"train","step":1}\n{"kind":"tra')
    with Journal(path, resume_step=1) as journal:
        journal.write("train", 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    config = OptimSection(lr=2.0, warmup_share=0.1, final_lr_share=0.05)
    rates = [learning_rate(config, share / 100) for share in range(101)]
    assert rates[5] == pytest.approx(1.0)
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx((2.0 + 0.1) / 2)
    assert rates[100] == pytest.approx(0.1)
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert min(rates) > 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimiser_and_norms_do_not_decay(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.LayerNorm(6))
    config = OptimSection(name=name, weight_decay=0.5)
    optimisers = make_optimisers(model, config)
    set_learning_rate(optimisers, 0.125)
    seen = []
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            assert group["lr"] == 0.125
            for parameter in group["params"]:
                seen.append(id(parameter))
                assert group["weight_decay"] == (0.5 if parameter.ndim == 2 else 0.0)
    assert sorted(seen) == sorted(id(p) for p in model.parameters())


def test_padding_marks_what_the_target_wrote() -> None:
    some = [
        Trajectory(np.array([7, 8, 9, 10], np.int32), 2, 0),
        Trajectory(np.arange(33, dtype=np.int32), 30, 1),
    ]
    tokens, mask = pad(some, torch.device("cpu"))
    assert tokens.shape == mask.shape == (2, 64)
    assert tokens[0, :5].tolist() == [7, 8, 9, 10, 0]
    assert mask[0].nonzero().flatten().tolist() == [2, 3]
    assert mask[1].nonzero().flatten().tolist() == [30, 31, 32]


def test_an_epoch_visits_every_sequence_once_in_batches_of_bounded_size() -> None:
    batches = epoch_batches(LENGTHS, 400, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(batch) * max(LENGTHS[i] for i in batch) <= 400 for batch in batches)
    assert batches == epoch_batches(LENGTHS, 400, seed=1, epoch=0)
    assert batches != epoch_batches(LENGTHS, 400, seed=1, epoch=1)
    assert batches != epoch_batches(LENGTHS, 400, seed=2, epoch=0)


def test_a_sequence_larger_than_a_batch_is_a_batch() -> None:
    assert pack([5, 900, 4, 4], 10) == [[0], [1], [2, 3]]


def test_skipping_batches_goes_on_in_the_same_order() -> None:
    whole = endless(LENGTHS, 400, seed=1)
    count = len(epoch_batches(LENGTHS, 400, seed=1, epoch=0))
    order = [next(whole) for _ in range(3 * count)]
    for skip in (0, 1, count, count + 7, 2 * count - 1):
        resumed = endless(LENGTHS, 400, seed=1, skip=skip)
        assert [next(resumed) for _ in range(20)] == order[skip : skip + 20]
