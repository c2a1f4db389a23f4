from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.versions import is_context_weight
from online.batch import BlockBatch, sample_blocks
from online.config import BatchSection, LearnConfig, OptimiserSection
from online.evaluator import Evaluator
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.world import DRAFTER

CONFIG = LearnConfig(
    batch=BatchSection(trajectories=4, blocks=12),
    optimiser=OptimiserSection(learning_rate=3e-3, warmup_steps=2),
)


def batches(
    trajectories: Sequence[Trajectory], count: int, config: LearnConfig = CONFIG
) -> list[list[BlockBatch]]:
    rng = np.random.default_rng(0)
    return [
        [
            sample_blocks(t, config.batch, DRAFTER.block_size, config.objective.decay, rng)
            for t in trajectories[:4]
        ]
        for _ in range(count)
    ]


def weights(drafter: BlockDrafter) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("mode", ["frozen-kv", "full"])
def test_the_loss_falls_and_only_trained_weights_move(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory], mode: str
) -> None:
    config = msgspec.structs.replace(CONFIG, mode=mode)
    before = weights(drafter)
    trainer = Trainer(drafter, matrices, config)
    reports = [trainer.step(batch) for batch in batches(trajectories, 30)]
    assert all(report.applied for report in reports)
    first, last = (np.mean([r.loss for r in part]) for part in (reports[:3], reports[-3:]))
    assert last < 0.7 * first
    assert reports[-1].accuracy > reports[0].accuracy
    assert trainer.steps == 30
    assert trainer.tokens_seen == sum(report.tokens for report in reports)
    moved = {
        name for name, value in weights(drafter).items() if not torch.equal(value, before[name])
    }
    expected = {n for n in before if mode == "full" or not is_context_weight(n)}
    assert moved == expected


def test_the_reported_loss_is_the_mix_of_its_parts(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    trainer = Trainer(drafter, matrices, CONFIG)
    (batch,) = batches(trajectories, 1)
    report = trainer.step(batch)
    assert report.applied
    assert report.loss == pytest.approx(
        CONFIG.objective.alpha * report.cross_entropy
        + (1 - CONFIG.objective.alpha) * report.divergence,
        rel=1e-5,
    )


@pytest.mark.parametrize("where", ["taps", "gradient"])
def test_a_step_with_bad_numbers_changes_nothing_and_is_counted(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory], where: str
) -> None:
    trainer = Trainer(drafter, matrices, CONFIG)
    first, bad, after = batches(trajectories, 3)
    trainer.step(first)
    before, state = weights(drafter), trainer.state_tensors()
    if where == "taps":
        bad[1].trajectory.taps.fill_(float("nan"))
        report = trainer.step(bad)
    else:
        handle = drafter.norm.weight.register_hook(lambda g: torch.full_like(g, float("inf")))
        report = trainer.step(bad)
        handle.remove()
    assert not report.applied
    assert (trainer.steps, trainer.skipped_steps) == (1, 1)
    assert all(torch.equal(value, before[name]) for name, value in weights(drafter).items())
    now = trainer.state_tensors()
    assert all(torch.equal(now[name], state[name]) for name in state)
    assert trainer.step(
        [part for part in after if torch.isfinite(part.trajectory.taps).all()]
    ).applied


def test_a_batch_without_labels_is_no_step(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    (batch,) = batches(trajectories, 1)
    empty = BlockBatch(
        batch[0].trajectory,
        batch[0].anchors,
        batch[0].teacher_rows,
        batch[0].weights * 0,
        batch[0].is_random,
        batch[0].rejected,
    )
    trainer = Trainer(drafter, matrices, CONFIG)
    assert not trainer.step([empty]).applied
    assert (trainer.steps, trainer.skipped_steps) == (0, 0)


def test_the_length_head_learns_how_much_of_a_block_is_accepted(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    torch.manual_seed(1)
    drafter = BlockDrafter(replace(DRAFTER, length_head_width=16))
    head = drafter.thresh_head_two_model
    assert head is not None
    config = msgspec.structs.replace(
        CONFIG, optimiser=OptimiserSection(learning_rate=3e-3, head_learning_rate=1e-2)
    )
    trainer = Trainer(drafter, matrices, config)
    seen: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda _, inputs, shares: seen.append((inputs[0], shares)))
    for batch in batches(trajectories, 60, config):
        assert trainer.step(batch).applied
    handle.remove()
    assert not any(states.requires_grad for states, _ in seen)
    # Nothing is learned of the tiny target, so nearly every block ends with its first draft.
    first, last = (float(shares.mean()) for _, shares in (seen[0], seen[-1]))
    assert abs(last - 1 / DRAFTER.block_size) < abs(first - 1 / DRAFTER.block_size)


def test_the_length_head_leaves_the_body_alone(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    moved = []
    for width in (None, 16):
        torch.manual_seed(1)
        drafter = BlockDrafter(DRAFTER)
        with_head = BlockDrafter(replace(DRAFTER, length_head_width=width))
        with_head.load_state_dict(drafter.state_dict(), strict=False)
        trainer = Trainer(with_head, matrices, CONFIG)
        for batch in batches(trajectories, 3):
            trainer.step(batch)
        moved.append(weights(with_head))
    bare, headed = moved
    assert all(torch.equal(headed[name], value) for name, value in bare.items())
    assert len(headed) == len(bare) + 6


def test_a_resumed_trainer_goes_on_exactly(
    matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    def fresh() -> Trainer:
        torch.manual_seed(5)
        return Trainer(BlockDrafter(DRAFTER), matrices, CONFIG)

    parts = batches(trajectories, 6)
    straight, stopped, resumed = fresh(), fresh(), fresh()
    for batch in parts:
        straight.step(batch)
    for batch in parts[:3]:
        stopped.step(batch)
    resumed.load_state_tensors(stopped.state_tensors(), stopped.optimiser_steps)
    for batch in parts[3:]:
        resumed.step(batch)
    expected = weights(straight.drafter)
    assert all(torch.equal(v, expected[n]) for n, v in weights(resumed.drafter).items())
    assert resumed.optimiser_steps == straight.optimiser_steps == 6


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("weight/norm.weight", lambda t: t * float("nan")),
        ("mean/norm.weight", lambda t: t + float("inf")),
        ("square/norm.weight", lambda t: t[1:]),
        ("weight/norm.weight", None),
        ("square/norm.weight", None),
        ("mean/norm.weight", None),
    ],
)
def test_a_damaged_state_is_refused_whole(
    matrices: TargetMatrices,
    trajectories: list[Trajectory],
    drafter: BlockDrafter,
    name: str,
    damage: Callable[[Tensor], Tensor] | None,
) -> None:
    trainer = Trainer(drafter, matrices, CONFIG)
    first, second = batches(trajectories, 2)
    trainer.step(first)
    state = trainer.state_tensors()
    damaged = state.pop(name)
    if damage is not None:
        state[name] = damage(damaged)
    trainer.step(second)
    before = weights(drafter)
    with pytest.raises(AdaSpecError, match=r"norm\.weight"):
        trainer.load_state_tensors(state, 1)
    assert all(torch.equal(value, before[key]) for key, value in weights(drafter).items())


def test_exports_have_the_published_types_and_restarting_forgets_moments(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory]
) -> None:
    base = {name: p.detach().bfloat16() for name, p in drafter.named_parameters()}
    trainer = Trainer(drafter, matrices, CONFIG)
    trainer.restart_from(base)
    for batch in batches(trajectories, 3):
        trainer.step(batch)
    exported = trainer.export(base)
    assert exported.keys() == base.keys()
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(exported[n], base[n]) for n in base if is_context_weight(n))
    assert not torch.equal(exported["norm.weight"], base["norm.weight"])
    trainer.restart_from(base)
    assert trainer.optimiser_steps == 0
    assert trainer.steps == 3
    assert all(torch.equal(t, base[n]) for n, t in trainer.export(base).items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["frozen-kv", "full"])
def test_training_on_a_gpu_lowers_the_loss_as_well(
    drafter: BlockDrafter, matrices: TargetMatrices, trajectories: list[Trajectory], mode: str
) -> None:
    config = msgspec.structs.replace(CONFIG, mode=mode)
    on_gpu = TargetMatrices(
        matrices.embedding.cuda().bfloat16(), matrices.lm_head.cuda().bfloat16()
    )
    trainer = Trainer(drafter.cuda(), on_gpu, config)
    reports = [trainer.step(batch) for batch in batches(trajectories, 30)]
    assert all(report.applied for report in reports)
    assert reports[-1].loss < 0.7 * reports[0].loss
    exported = trainer.export({name: p.detach() for name, p in drafter.named_parameters()})
    evaluator = Evaluator(DRAFTER, on_gpu, passes=8, max_context=4096)
    assert all(w.committed >= w.passes for w in evaluator.candidate(exported, trajectories))
