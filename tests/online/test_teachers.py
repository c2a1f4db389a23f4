"""Largest logits or hidden states: what a learner does with either kind of teacher."""

import numpy as np
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import HiddenTeacher, TopKTeacher
from online.assembly import Assembler
from online.batch import sample_blocks
from online.config import BatchSection, IntakeSection, LearnConfig, OptimiserSection
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.world import DRAFTER, Request, TinyTarget, captures, records_of

CONFIG = LearnConfig(
    batch=BatchSection(trajectories=4, blocks=12),
    optimiser=OptimiserSection(learning_rate=3e-3, warmup_steps=2),
)


def assemble(
    kind: str,
    requests: list[Request],
    drafter: BlockDrafter,
    target: TinyTarget,
    matrices: TargetMatrices,
) -> list[Trajectory]:
    assembler = Assembler(IntakeSection(top_k=0), DRAFTER, matrices)
    return [
        trajectory
        for request in requests
        for record in records_of(captures(request, drafter, target, kind))
        for trajectory in assembler.add(record)
    ]


def weights(drafter: BlockDrafter) -> Tensor:
    return torch.cat([p.detach().flatten() for p in drafter.parameters()])


def movement(trajectories: list[Trajectory], matrices: TargetMatrices) -> Tensor:
    """How a few steps from the same start change the weights."""
    torch.manual_seed(1)
    drafter = BlockDrafter(DRAFTER)
    before = weights(drafter)
    trainer, rng = Trainer(drafter, matrices, CONFIG), np.random.default_rng(0)
    for _ in range(5):
        batch = [
            sample_blocks(t, CONFIG.batch, DRAFTER.block_size, CONFIG.objective.decay, rng)
            for t in trajectories[:4]
        ]
        assert trainer.step(batch).applied
    return weights(drafter) - before


def test_both_teachers_train_the_same_way(
    requests: list[Request], target: TinyTarget, matrices: TargetMatrices, drafter: BlockDrafter
) -> None:
    top_k, hidden = (
        assemble(kind, requests, drafter, target, matrices) for kind in ("top-k", "hidden")
    )
    assert all(isinstance(trajectory.teacher, TopKTeacher) for trajectory in top_k)
    assert all(isinstance(trajectory.teacher, HiddenTeacher) for trajectory in hidden)
    for one, other in zip(top_k, hidden, strict=True):
        assert torch.equal(one.teacher_tokens, other.teacher_tokens)
    by_logits, by_states = movement(top_k, matrices), movement(hidden, matrices)
    assert torch.cosine_similarity(by_logits, by_states, dim=0) > 0.9
    assert not torch.equal(by_logits, by_states)


def test_a_teacher_counts_in_memory(
    requests: list[Request], target: TinyTarget, matrices: TargetMatrices, drafter: BlockDrafter
) -> None:
    for kind in ("top-k", "hidden"):
        (trajectory, *_) = assemble(kind, requests, drafter, target, matrices)
        held = [trajectory.tokens, trajectory.taps, trajectory.teacher_tokens]
        held += trajectory.teacher.tensors()
        assert trajectory.nbytes == sum(tensor.nbytes for tensor in held)
