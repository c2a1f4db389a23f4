"""The learner's own state on disk: weights in training, moments, counters and random state.

Replayed trajectories are not saved: traffic replaces them within minutes, and they can be gigabytes
of users' text. States are numbered directories; the newest complete one counts, so that a crash
while one is written loses nothing.
"""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaspec.errors import AdaSpecError
from adaspec.files import replace_directory
from adaspec.versions import Mode

logger = logging.getLogger(__name__)

_STATE_NAME = "state.json"
_TENSORS_NAME = "training.safetensors"


class LearnerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a restart goes on from; totals as in `LearnerStatus`.

    Attributes:
        parent: version the weights in training continue.
        sequence: of the version pointer when this was saved.
        optimiser_steps: steps since the moments were last forgotten.
        steps_since_gate: steps since the last candidate was judged.
        rng: numpy's bit generator state as JSON; its integers have 128 bits.
    """

    format: int = 1
    lineage: str
    mode: Mode
    parent: int
    sequence: int
    steps: int
    skipped_steps: int
    tokens_seen: int
    optimiser_steps: int
    steps_since_gate: int
    learning_seconds: float
    published: int
    kept: int
    rolled_back: int
    failures: int
    rng: str


@dataclass(frozen=True)
class SavedState:
    """A state as read back."""

    state: LearnerState
    tensors: dict[str, Tensor]


def save_state(directory: Path, state: LearnerState, tensors: dict[str, Tensor]) -> None:
    """Add a state and delete older ones.

    Raises:
        AdaSpecError: if it cannot be written; older states stay.
    """
    numbers = _numbers(directory)
    number = max(numbers, default=-1) + 1
    try:
        with replace_directory(directory / f"{number:08d}") as staging:
            save_file(tensors, staging / _TENSORS_NAME)
            (staging / _STATE_NAME).write_bytes(msgspec.json.encode(state))
    except (OSError, SafetensorError) as error:
        raise AdaSpecError(
            f"the learner's state could not be written to {directory} ({error}); free some disk "
            "space. Until then a restart goes on from an older state."
        ) from error
    # Hidden ones are the scratch of a learner that was killed.
    for old in [*(directory / f"{number:08d}" for number in numbers), *directory.glob(".*")]:
        shutil.rmtree(old, ignore_errors=True)


def load_state(directory: Path, lineage: str, mode: Mode) -> SavedState | None:
    """The newest state that can be read and belongs here, or None; what is skipped is logged."""
    for number in reversed(_numbers(directory)):
        path = directory / f"{number:08d}"
        try:
            state = msgspec.json.decode((path / _STATE_NAME).read_bytes(), type=LearnerState)
            tensors = load_file(path / _TENSORS_NAME)
        except (OSError, msgspec.DecodeError, SafetensorError) as error:
            logger.warning("the learner's state %s cannot be read and is skipped: %s", path, error)
            continue
        if (state.lineage, state.mode) != (lineage, mode):
            logger.warning(
                "the learner's state %s is of lineage %s and mode %s, not %s and %s; starting anew",
                path,
                state.lineage,
                state.mode,
                lineage,
                mode,
            )
            return None
        return SavedState(state, tensors)
    return None


def dump_rng(rng: np.random.Generator) -> str:
    """The generator's state as text."""
    return json.dumps(rng.bit_generator.state)


def restore_rng(rng: np.random.Generator, dumped: str) -> None:
    """Continue where `dump_rng` was called."""
    rng.bit_generator.state = json.loads(dumped)


def _numbers(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
