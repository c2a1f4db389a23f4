"""What must not depend on number formats, order of arrival, or the weights that are trained."""

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import Record
from adaspec.versions import is_context_weight
from online import low_rank
from online.assembly import Assembler
from online.batch import sample_blocks
from online.config import (
    BatchSection,
    IntakeSection,
    LearnConfig,
    ObjectiveSection,
    OptimiserSection,
    ReplaySection,
    ScopeSection,
)
from online.replay import ReplayBuffer
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.test_trainer import CONFIG, batches
from tests.online.world import DRAFTER, Request, TinyTarget, captures, records_of


def named(drafter: BlockDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: p.detach().to(dtype, copy=True) for n, p in drafter.named_parameters()}


def test_steps_too_small_for_bfloat16_add_up(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    """The master weights are float32: many steps, each below a bfloat16 weight's resolution, are
    published once they amount to something."""
    settings = OptimiserSection(learning_rate=1e-5, warmup_steps=0)
    trainer = Trainer(drafter, matrices, msgspec.structs.replace(CONFIG, optimiser=settings))
    base = named(drafter, torch.bfloat16)
    trainer.restart_from(base)
    name = "layers.0.mlp.down_proj.weight"
    moved = []
    for batch in batches(trajectories, 60):
        trainer.step(batch)
        moved.append(int((trainer.export(base)[name] != base[name]).sum()))
    alone = base[name].float() - 1e-5 * torch.ones_like(base[name].float())
    lost = (alone.bfloat16() == base[name]).float().mean()
    assert lost > 0.9  # a single step in bfloat16 would leave nearly all weights where they are
    assert moved[0] < 0.2 * base[name].numel()
    assert moved[-1] > 2 * moved[0]


def test_a_clipped_step_is_as_long_whatever_the_gradients_scale(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    """Plain descent with a clip far below the gradient's norm moves by rate * clip."""
    settings = OptimiserSection(rule="sgd", learning_rate=1.0, clip_norm=1e-3, warmup_steps=0)
    lengths = []
    for alpha in (1.0, 0.2):
        torch.manual_seed(1)
        drafter = BlockDrafter(DRAFTER)
        before = named(drafter, torch.float64)
        config = msgspec.structs.replace(
            CONFIG, optimiser=settings, objective=ObjectiveSection(alpha=alpha, clip=1e9)
        )
        Trainer(drafter, matrices, config).step(batches(trajectories, 1)[0])
        after = named(drafter, torch.float64)
        lengths.append(sum(float((after[n] - before[n]).square().sum()) for n in after) ** 0.5)
    assert lengths == pytest.approx([1e-3, 1e-3], rel=0.01)


def interleaved(records: list[list[Record]], seed: int) -> list[Record]:
    """Records of several requests in a random order that keeps each request's own."""
    rng = np.random.default_rng(seed)
    owners = rng.permutation([i for i, own in enumerate(records) for _ in own])
    queues = [iter(own) for own in records]
    return [next(queues[owner]) for owner in owners]


def test_the_order_of_arrival_changes_learning_by_noise_only(
    requests: list[Request], target: TinyTarget, matrices: TargetMatrices
) -> None:
    losses, contents = [], []
    for seed in range(3):
        torch.manual_seed(1)
        drafter = BlockDrafter(DRAFTER)
        assembler = Assembler(IntakeSection(top_k=0), DRAFTER, matrices)
        replay = ReplayBuffer(ReplaySection(held_back=0.0, fresh=0))
        records = [records_of(captures(request, drafter, target)) for request in requests]
        for record in interleaved(records, seed):
            for trajectory in assembler.add(record):  # type: ignore[arg-type]
                replay.add(trajectory)
        finished = sorted(replay.take_new(), key=lambda t: t.request)
        contents.append([(t.request, t.tokens.tolist(), t.blocks) for t in finished])
        trainer, rng = Trainer(drafter, matrices, CONFIG), np.random.default_rng(0)
        for _ in range(40):
            drawn = replay.draw(4, rng)
            report = trainer.step(
                [sample_blocks(t, CONFIG.batch, DRAFTER.block_size, 7.0, rng) for t in drawn]
            )
        losses.append(report.loss)
    assert contents[0] == contents[1] == contents[2]
    assert max(losses) < 1.5 * min(losses)


SCOPES = [
    ScopeSection(),
    ScopeSection(weights="last-layers", layers=1),
    ScopeSection(weights="low-rank", rank=4),
]


@pytest.mark.parametrize("mode", ["frozen-kv", "full"])
@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.weights)
def test_only_weights_in_scope_move_and_the_loss_falls(
    drafter: BlockDrafter,
    matrices: TargetMatrices,
    trajectories: list[Trajectory],
    scope: ScopeSection,
    mode: str,
) -> None:
    base = named(drafter, torch.float32)
    trainer = Trainer(drafter, matrices, msgspec.structs.replace(CONFIG, scope=scope, mode=mode))
    trainer.restart_from(base)
    reports = [trainer.step(batch) for batch in batches(trajectories, 30)]
    assert reports[-1].loss < 0.9 * reports[0].loss
    after = trainer.export(base)
    moved = {name for name, value in after.items() if not torch.equal(value, base[name])}
    allowed = {name for name in base if mode == "full" or not is_context_weight(name)}
    if scope.weights == "last-layers":
        last = f"layers.{DRAFTER.num_hidden_layers - 1}."
        allowed = {n for n in allowed if n.startswith((last, "norm."))}
    elif scope.weights == "low-rank":
        allowed = {name for name in allowed if base[name].dim() == 2}
        for name in allowed:
            assert int(torch.linalg.matrix_rank(after[name] - base[name], atol=1e-5)) <= 4
    assert moved == allowed
    trainer.restart_from(base)
    assert all(torch.equal(value, base[name]) for name, value in trainer.export(base).items())


def test_a_low_rank_state_is_small_and_brings_the_weights_back(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    config = msgspec.structs.replace(CONFIG, scope=ScopeSection(weights="low-rank", rank=2))
    base = named(drafter, torch.float32)
    whole = sum(tensor.numel() for tensor in base.values())
    trainer = Trainer(drafter, matrices, config)
    for batch in batches(trajectories, 3):
        trainer.step(batch)
    saved = trainer.state_tensors()
    assert sum(tensor.numel() for tensor in saved.values()) < 1.2 * whole
    other = BlockDrafter(DRAFTER)
    resumed = Trainer(other, matrices, config)
    resumed.restart_from(base)
    resumed.load_state_tensors(saved, trainer.optimiser_steps)
    expected = trainer.export(base)
    assert all(torch.equal(v, expected[n]) for n, v in resumed.export(base).items())
    assert torch.equal(low_rank.original(other, "fc.weight"), base["fc.weight"])


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveSection(clip_order="mean", clip=0.01),
        ObjectiveSection(kind="osd"),
        ObjectiveSection(kind="osd", divergence="jsd", wrong_only=False),
        ObjectiveSection(kind="survival"),
        ObjectiveSection(kind="survival", negatives=0.3),
    ],
    ids=str,
)
def test_every_objective_makes_the_drafter_more_accurate(
    drafter: BlockDrafter,
    matrices: TargetMatrices,
    trajectories: list[Trajectory],
    objective: ObjectiveSection,
) -> None:
    config: LearnConfig = msgspec.structs.replace(CONFIG, objective=objective)
    trainer = Trainer(drafter, matrices, config)
    rng = np.random.default_rng(0)
    decay = objective.position_decay
    reports = [
        trainer.step(
            [
                sample_blocks(t, BatchSection(blocks=12), DRAFTER.block_size, decay, rng)
                for t in trajectories[:4]
            ]
        )
        for _ in range(60)
    ]
    assert all(report.applied for report in reports)
    first, last = (np.mean([r.accuracy for r in part]) for part in (reports[:5], reports[-5:]))
    assert last > first + 0.05
