"""Recorded feedback on disk: finished trajectories in the order in which they came in.

One directory per phase of the traffic, one safetensors file per trajectory, so that a recording is
read piece by piece and holds nothing that could be executed.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adaspec.feedback import HiddenTeacher, Teacher, TopKTeacher
from online.trajectory import DraftedBlock, Trajectory

_HEADER = "trajectory"


class _Header(msgspec.Struct, frozen=True):
    request: str
    prompt_length: int
    temperature: float
    blocks: list[tuple[int, int, int, int, int]]


def save_trajectory(path: Path, trajectory: Trajectory) -> None:
    """Write one trajectory; the directory must exist."""
    header = _Header(
        trajectory.request,
        trajectory.prompt_length,
        trajectory.temperature,
        [(b.anchor, b.accepted, b.verify_length, b.version, b.rejected) for b in trajectory.blocks],
    )
    tensors = {"tokens": trajectory.tokens.to(torch.int32), "taps": trajectory.taps}
    teacher = trajectory.teacher
    if isinstance(teacher, HiddenTeacher):
        tensors["states"] = teacher.states
    else:
        tensors["logits"] = teacher.logits
        tensors["token_ids"] = teacher.token_ids
        tensors["logsumexp"] = teacher.logsumexp
    tensors["teacher_tokens"] = trajectory.teacher_tokens.to(torch.int32)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={_HEADER: msgspec.json.encode(header).decode()})


def load_trajectory(path: Path) -> Trajectory:
    """Read what `save_trajectory` wrote."""
    with safe_open(path, framework="pt") as file:
        header = msgspec.json.decode(file.metadata()[_HEADER], type=_Header)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    teacher: Teacher
    if "states" in tensors:
        teacher = HiddenTeacher(tensors["states"])
    else:
        teacher = TopKTeacher(tensors["logits"], tensors["token_ids"], tensors["logsumexp"])
    return Trajectory(
        request=header.request,
        tokens=tensors["tokens"].long(),
        taps=tensors["taps"],
        prompt_length=header.prompt_length,
        teacher=teacher,
        teacher_tokens=tensors["teacher_tokens"].long(),
        blocks=tuple(DraftedBlock(*block) for block in header.blocks),
        temperature=header.temperature,
    )


def load_phase(directory: Path) -> Iterator[Trajectory]:
    """All trajectories of a phase, oldest first."""
    for path in sorted(directory.glob("*.safetensors")):
        yield load_trajectory(path)
