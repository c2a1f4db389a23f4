import errno
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from adaspec.errors import AdaSpecError
from online import state as state_module
from online.state import LearnerState, dump_rng, load_state, restore_rng, save_state
from tests.online.world import LINEAGE

STATE = LearnerState(
    lineage=LINEAGE,
    mode="frozen-kv",
    parent=2,
    sequence=5,
    steps=120,
    skipped_steps=1,
    tokens_seen=4096,
    optimiser_steps=40,
    steps_since_gate=7,
    learning_seconds=12.5,
    published=2,
    kept=1,
    rolled_back=0,
    failures=0,
    rng=dump_rng(np.random.default_rng(0)),
)
TENSORS = {"weight/norm.weight": torch.arange(4.0)}


def later(steps: int) -> LearnerState:
    return msgspec.structs.replace(STATE, steps=steps)


def test_the_newest_state_comes_back_exactly(tmp_path: Path) -> None:
    save_state(tmp_path / "learner", STATE, TENSORS)
    save_state(tmp_path / "learner", later(130), {"weight/norm.weight": torch.ones(4)})
    saved = load_state(tmp_path / "learner", LINEAGE, "frozen-kv")
    assert saved is not None
    assert saved.state == later(130)
    assert torch.equal(saved.tensors["weight/norm.weight"], torch.ones(4))
    assert len(list((tmp_path / "learner").iterdir())) == 1


def test_a_torn_state_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    directory = tmp_path / "learner"
    save_state(directory, STATE, TENSORS)
    (directory / "00000000").rename(tmp_path / "older")
    save_state(directory, later(130), TENSORS)
    (directory / "00000000").rename(directory / "00000001")
    (tmp_path / "older").rename(directory / "00000000")
    weights = directory / "00000001" / "training.safetensors"
    weights.write_bytes(weights.read_bytes()[:20])
    saved = load_state(directory, LINEAGE, "frozen-kv")
    assert saved is not None
    assert saved.state == STATE


@pytest.mark.parametrize(("lineage", "mode"), [("f" * 16, "frozen-kv"), (LINEAGE, "full")])
def test_a_state_that_does_not_belong_here_is_not_used(
    tmp_path: Path, lineage: str, mode: str
) -> None:
    save_state(tmp_path / "learner", STATE, TENSORS)
    assert load_state(tmp_path / "learner", lineage, mode) is None


def test_the_scratch_of_a_killed_learner_is_removed(tmp_path: Path) -> None:
    (tmp_path / "learner" / ".00000000.x1y2" / "new").mkdir(parents=True)
    save_state(tmp_path / "learner", STATE, TENSORS)
    assert [path.name for path in (tmp_path / "learner").iterdir()] == ["00000000"]


def test_without_a_state_there_is_none(tmp_path: Path) -> None:
    assert load_state(tmp_path / "learner", LINEAGE, "full") is None


def test_a_full_disk_leaves_the_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_state(tmp_path / "learner", STATE, TENSORS)
    monkeypatch.setattr(state_module, "save_file", full)
    with pytest.raises(AdaSpecError, match="No space left"):
        save_state(tmp_path / "learner", later(130), TENSORS)
    saved = load_state(tmp_path / "learner", LINEAGE, "frozen-kv")
    assert saved is not None
    assert saved.state == STATE


def test_the_random_state_goes_on_where_it_was() -> None:
    rng = np.random.default_rng(3)
    rng.random(5)
    dumped = dump_rng(rng)
    expected = rng.random(4)
    other = np.random.default_rng(9)
    restore_rng(other, dumped)
    assert np.array_equal(other.random(4), expected)
