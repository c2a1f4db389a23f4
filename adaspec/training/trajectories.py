"""Trajectories: a prompt and the target's own continuation, as token ids."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from adaspec.errors import AdaSpecError


@dataclass(frozen=True)
class Trajectory:
    """One sequence.

    Attributes:
        tokens: int ``[length]``, prompt and response, the end token included if it came.
        prompt_length: tokens of the prompt.
        prompt_id: number of the prompt in its list.
    """

    tokens: npt.NDArray[np.int32]
    prompt_length: int
    prompt_id: int

    @property
    def response_length(self) -> int:
        """Tokens the target wrote."""
        return len(self.tokens) - self.prompt_length


def save_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one compressed shard, atomically. Ids take two bytes each where they fit."""
    flat = np.concatenate([t.tokens for t in trajectories]) if trajectories else np.zeros(0, int)
    narrow = flat.size == 0 or int(flat.max()) < 1 << 16
    temporary = path.with_name(f".{path.name}.npz")
    np.savez_compressed(
        temporary,
        tokens=flat.astype(np.uint16 if narrow else np.int32),
        lengths=np.array([len(t.tokens) for t in trajectories], np.int32),
        prompt_lengths=np.array([t.prompt_length for t in trajectories], np.int32),
        prompt_ids=np.array([t.prompt_id for t in trajectories], np.int32),
    )
    temporary.replace(path)


def load_trajectories(paths: Iterable[Path]) -> list[Trajectory]:
    """Read shards, in the order given.

    Raises:
        AdaSpecError: if a shard is missing or damaged.
    """
    loaded: list[Trajectory] = []
    for path in paths:
        try:
            with np.load(path) as shard:
                tokens = shard["tokens"].astype(np.int32)
                lengths, prompts = shard["lengths"], shard["prompt_lengths"]
                ids = shard["prompt_ids"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            raise AdaSpecError(
                f"{path} is not a trajectory shard ({error}); delete it to make it again."
            ) from None
        pieces = np.split(tokens, np.cumsum(lengths))[:-1]
        loaded.extend(
            Trajectory(piece, int(prompt), int(number))
            for piece, prompt, number in zip(pieces, prompts, ids, strict=True)
        )
    return loaded
