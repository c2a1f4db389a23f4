"""Packed blocks: one padded batch teaches what its trajectories teach one by one."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import TopKTeacher
from online.batch import BlockBatch, sample_blocks
from online.config import BatchSection, LearnConfig
from online.packing import pack
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.world import DRAFTER

CPU = torch.device("cpu")


def parts_of_several_lengths(trajectories: Sequence[Trajectory]) -> list[BlockBatch]:
    """Contexts of 10, 14, 18 … tokens and, in the shorter ones, fewer blocks."""
    rng = np.random.default_rng(0)
    return [
        sample_blocks(t, BatchSection(blocks=8, max_context=10 + 4 * i), DRAFTER.block_size, 7, rng)
        for i, t in enumerate(trajectories[:4])
    ]


def gradients(
    trainer: Trainer, drafter: BlockDrafter, parts: Sequence[BlockBatch]
) -> dict[str, Tensor]:
    """Of one step, as accumulated when it ended; the weights are put back."""
    kept: dict[str, Tensor] = {}
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    handles = [
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: kept.update({name: p.grad.clone()})
        )
        for name, p in drafter.named_parameters()
        if p.requires_grad
    ]
    assert trainer.step(parts).applied
    for handle in handles:
        handle.remove()
    trainer.restart_from(before)
    return kept


@pytest.mark.parametrize("mode", ["frozen-kv", "full"])
def test_packing_does_not_change_the_gradient(
    drafter: BlockDrafter,
    matrices: TargetMatrices,
    trajectories: list[Trajectory],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    parts = parts_of_several_lengths(trajectories)
    trainer = Trainer(drafter, matrices, LearnConfig(mode=mode))
    together = gradients(trainer, drafter, parts)
    monkeypatch.setattr("online.trainer._CONTEXT_ROWS", 1)
    apart = gradients(trainer, drafter, parts)
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("capacity", [1, 30, 10_000])
def test_every_counted_position_is_packed_once_and_batches_are_bounded(
    trajectories: list[Trajectory], capacity: int
) -> None:
    parts = parts_of_several_lengths(trajectories)
    packed = list(pack(parts, DRAFTER, CPU, capacity))
    assert sum(int(p.counted.sum()) for p in packed) == sum(part.tokens for part in parts)
    assert sum(float(p.weights.sum()) for p in packed) == pytest.approx(
        sum(float(part.weights.sum()) for part in parts)
    )
    for batch in packed:
        assert batch.taps.shape[0] == 1 or batch.taps.shape[0] * batch.taps.shape[1] <= capacity
        assert len(batch.labels) == len(batch.teacher) == len(batch.weights)


def test_teachers_of_different_forms_do_not_share_a_batch(trajectories: list[Trajectory]) -> None:
    parts = parts_of_several_lengths(trajectories)
    teacher = parts[0].trajectory.teacher
    assert isinstance(teacher, TopKTeacher)
    fewer = TopKTeacher(teacher.logits[:, :3], teacher.token_ids[:, :3], teacher.logsumexp)
    other = parts[0].trajectory.__class__(**{**vars(parts[0].trajectory), "teacher": fewer})
    parts[0] = dataclasses.replace(parts[0], trajectory=other)
    widths = [p.teacher.logits.shape[1] for p in pack(parts, DRAFTER, CPU, 10_000)]
    assert sorted(widths) == sorted({3, teacher.logits.shape[1]})
