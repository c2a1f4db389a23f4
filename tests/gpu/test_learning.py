"""The learner's computations on a GPU agree with those on the CPU."""

import numpy as np
import pytest
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from online.assembly import Assembler
from online.batch import BlockBatch, sample_blocks
from online.config import (
    BatchSection,
    IntakeSection,
    LearnConfig,
    OptimiserSection,
    ProcessSection,
)
from online.device import limit_memory
from online.evaluator import Evaluator
from online.shadow import walk
from online.target import TargetMatrices
from online.trainer import StepReport, Trainer
from online.trajectory import Trajectory
from tests.online.world import (
    DRAFTER,
    TinyTarget,
    captures,
    random_prompt,
    records_of,
    save_target,
)

pytestmark = pytest.mark.gpu

CONFIG = LearnConfig(
    mode="full",
    batch=BatchSection(trajectories=4, blocks=12),
    optimiser=OptimiserSection(learning_rate=3e-3, warmup_steps=2, clip_norm=1e6),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return TinyTarget(save_target(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def matrices(world: TinyTarget) -> TargetMatrices:
    return TargetMatrices(world.embedding, world.lm_head)


def drafter() -> BlockDrafter:
    torch.manual_seed(1)
    return BlockDrafter(DRAFTER)


@pytest.fixture(scope="module", params=["top-k", "hidden"])
def trajectories(
    request: pytest.FixtureRequest, world: TinyTarget, matrices: TargetMatrices
) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(2)
    prompts = {f"request-{i}": random_prompt(generator) for i in range(8)}
    assembler = Assembler(IntakeSection(), DRAFTER, matrices)
    finished = []
    for served in world.requests(prompts, 30):
        for record in records_of(captures(served, drafter(), world, request.param)):
            finished += assembler.add(record)
    return finished


def on_gpu(matrices: TargetMatrices, dtype: torch.dtype) -> TargetMatrices:
    return TargetMatrices(matrices.embedding.to("cuda", dtype), matrices.lm_head.to("cuda", dtype))


def batches(trajectories: list[Trajectory], count: int) -> list[list[BlockBatch]]:
    rng = np.random.default_rng(0)
    decay = CONFIG.objective.decay
    return [
        [sample_blocks(t, CONFIG.batch, DRAFTER.block_size, decay, rng) for t in trajectories[:4]]
        for _ in range(count)
    ]


def first_gradients(trainer: Trainer, batch: list[BlockBatch]) -> tuple[StepReport, Tensor]:
    """A first step, and the gradient it took: AdamW's first mean is a tenth of it."""
    report = trainer.step(batch)
    means = [t.flatten() for n, t in trainer.state_tensors().items() if n.startswith("mean/")]
    return report, torch.cat(means) / (1 - CONFIG.optimiser.beta1)


def test_a_step_takes_the_cpus_gradient(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    (batch,) = batches(trajectories, 1)
    here, expected = first_gradients(Trainer(drafter(), matrices, CONFIG), batch)
    trainer = Trainer(drafter().cuda(), on_gpu(matrices, torch.bfloat16), CONFIG)
    there, gradient = first_gradients(trainer, batch)
    assert here.applied
    assert there.applied
    assert there.tokens == here.tokens
    assert there.loss == pytest.approx(here.loss, rel=0.02)
    assert torch.cosine_similarity(gradient, expected, dim=0) > 0.99
    assert float(gradient.norm()) == pytest.approx(float(expected.norm()), rel=0.05)


def test_a_resumed_trainer_goes_on_exactly(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    target = on_gpu(matrices, torch.bfloat16)
    parts = batches(trajectories, 4)
    straight = Trainer(drafter().cuda(), target, CONFIG)
    resumed = Trainer(drafter().cuda(), target, CONFIG)
    for batch in parts[:2]:
        straight.step(batch)
    resumed.load_state_tensors(straight.state_tensors(), straight.optimiser_steps)
    for batch in parts[2:]:
        reports = [trainer.step(batch) for trainer in (straight, resumed)]
        assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3)
    assert resumed.optimiser_steps == straight.optimiser_steps == 4


def test_walks_are_the_cpus(matrices: TargetMatrices, trajectories: list[Trajectory]) -> None:
    trained = drafter()
    trainer = Trainer(trained, matrices, CONFIG)
    for batch in batches(trajectories, 60):
        trainer.step(batch)
    here = walk(trained, matrices, trajectories, 8, max_context=4096)
    weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
    exact = on_gpu(matrices, torch.float32)
    assert walk(trained.cuda(), exact, trajectories, 8, max_context=4096) == here

    rate = sum(w.committed for w in here) / sum(w.passes for w in here)
    assert rate > 1.5  # the test sees acceptance
    evaluator = Evaluator(DRAFTER, on_gpu(matrices, torch.bfloat16), passes=8, max_context=4096)
    rounded = evaluator.candidate(weights, trajectories)
    assert sum(w.committed for w in rounded) / sum(w.passes for w in rounded) == pytest.approx(
        rate, rel=0.1
    )


def test_memory_does_not_grow_with_the_steps(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    trainer = Trainer(drafter().cuda(), on_gpu(matrices, torch.bfloat16), CONFIG)
    parts = batches(trajectories, 12)
    for batch in parts[:2]:
        trainer.step(batch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for batch in parts[2:]:
        trainer.step(batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held


def test_a_learner_runs_out_of_memory_before_the_server_does() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    limit_memory(device, ProcessSection(gpu_bytes=512 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert torch.empty(1 << 30, dtype=torch.uint8, device=device).is_cuda
