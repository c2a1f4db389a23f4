from pathlib import Path

import pytest
import torch

from adaspec.drafters.network import BlockDrafter
from online.assembly import Assembler
from online.config import IntakeSection
from online.target import TargetMatrices
from online.trajectory import Trajectory
from tests.online.world import (
    DRAFTER,
    Request,
    TinyTarget,
    captures,
    random_prompt,
    records_of,
    save_target,
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices are slower on several threads, much so on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_directory: Path) -> TinyTarget:
    return TinyTarget(target_directory)


@pytest.fixture(scope="session")
def matrices(target: TinyTarget) -> TargetMatrices:
    return TargetMatrices(target.embedding, target.lm_head)


@pytest.fixture
def drafter() -> BlockDrafter:
    torch.manual_seed(1)
    return BlockDrafter(DRAFTER)


@pytest.fixture(scope="session")
def requests(target: TinyTarget) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return target.requests({f"request-{i}": random_prompt(generator) for i in range(8)}, 30)


@pytest.fixture
def assembler(matrices: TargetMatrices) -> Assembler:
    return Assembler(IntakeSection(top_k=0), DRAFTER, matrices)


@pytest.fixture
def trajectories(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> list[Trajectory]:
    finished = []
    for request in requests:
        for record in records_of(captures(request, drafter, target)):
            finished += assembler.add(record)
    return finished
