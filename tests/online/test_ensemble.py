from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from online.batch import BlockBatch, sample_blocks
from online.config import BatchSection, EnsembleSection, LearnConfig, OptimiserSection, ScopeSection
from online.ensemble import Ensemble, build_training
from online.evaluator import Evaluator
from online.target import TargetMatrices
from online.trainer import Trainer
from online.trajectory import Trajectory
from tests.online.world import DRAFTER

CONFIG = LearnConfig(
    batch=BatchSection(trajectories=4, blocks=12),
    optimiser=OptimiserSection(learning_rate=3e-3, warmup_steps=2),
    ensemble=EnsembleSection(rates=(0.1, 1.0), eagerness=2.0),
)


@pytest.fixture
def base(drafter: BlockDrafter) -> dict[str, Tensor]:
    return {n: p.detach().to(torch.bfloat16) for n, p in drafter.named_parameters()}


def ensemble(
    matrices: TargetMatrices, base: dict[str, Tensor], config: LearnConfig = CONFIG
) -> Ensemble:
    evaluator = Evaluator(DRAFTER, matrices, passes=8, max_context=64)
    built = build_training(DRAFTER, matrices, config, base, evaluator)
    assert isinstance(built, Ensemble)
    return built


def batch(trajectories: Sequence[Trajectory], seed: int) -> list[BlockBatch]:
    rng = np.random.default_rng(seed)
    return [sample_blocks(t, CONFIG.batch, DRAFTER.block_size, 7.0, rng) for t in trajectories[:4]]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return sum(float((left[n].float() - right[n].float()).square().sum()) for n in left) ** 0.5


def test_one_rate_is_no_ensemble(matrices: TargetMatrices, base: dict[str, Tensor]) -> None:
    config = msgspec.structs.replace(CONFIG, ensemble=EnsembleSection())
    evaluator = Evaluator(DRAFTER, matrices, passes=8, max_context=64)
    built = build_training(DRAFTER, matrices, config, base, evaluator)
    assert isinstance(built, Trainer)
    assert built.trust == ()
    assert distance(built.export(base), base) == 0


def test_experts_part_by_their_rates_and_the_average_lies_between(
    matrices: TargetMatrices, base: dict[str, Tensor], trajectories: list[Trajectory]
) -> None:
    both = ensemble(matrices, base)
    assert both.trust == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert distance(both.export(base), base) == 0
    for seed in range(6):
        assert both.step(batch(trajectories, seed)).applied
    slow, fast = (expert.export(base) for expert in both._experts)
    assert 0 < distance(slow, base) < 0.5 * distance(fast, base)
    exact = {name: tensor.float() for name, tensor in base.items()}
    played = both.export(exact)
    slow, fast = (expert.export(exact) for expert in both._experts)
    expected = {n: (exact[n] + slow[n] + fast[n]) / 3 for n in exact}
    assert distance(played, expected) < 1e-4
    assert both.steps == both.optimiser_steps == 6


def test_trust_goes_to_whom_drafts_unseen_requests_best(
    matrices: TargetMatrices, base: dict[str, Tensor], trajectories: list[Trajectory]
) -> None:
    settings = EnsembleSection(rates=(0.001, 1.0), eagerness=4.0, play="leader")
    both = ensemble(matrices, base, msgspec.structs.replace(CONFIG, ensemble=settings))
    for seed in range(80):  # overfit: what counts here is that the fast one drafts better
        both.step(batch(trajectories, seed))
    for _ in range(12):
        both.observe(trajectories[:4])
    assert both.trust[2] > 0.8
    fast = both._experts[1].export(base)
    assert distance(both.export(base), fast) == 0


def test_the_base_is_played_while_the_others_are_worse(
    matrices: TargetMatrices, base: dict[str, Tensor], trajectories: list[Trajectory]
) -> None:
    good = ensemble(matrices, base)
    for seed in range(80):
        good.step(batch(trajectories, seed))
    learned = good._experts[1].export(base)
    settings = EnsembleSection(rates=(0.1, 1.0), eagerness=4.0, play="leader")
    both = ensemble(matrices, learned, msgspec.structs.replace(CONFIG, ensemble=settings))
    for expert in both._experts:
        expert.restart_from(base)  # untrained
    for _ in range(12):
        both.observe(trajectories[:4])
    assert both.trust[0] > 0.8
    assert distance(both.export(base), learned) == 0
    both.restart_from(learned)
    assert both.trust == pytest.approx((1 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("weights", ["all", "low-rank"])
def test_a_restart_brings_every_expert_back(
    matrices: TargetMatrices,
    base: dict[str, Tensor],
    trajectories: list[Trajectory],
    weights: str,
) -> None:
    config = msgspec.structs.replace(CONFIG, scope=ScopeSection(weights=weights, rank=4))  # type: ignore[arg-type]
    first = ensemble(matrices, base, config)
    for seed in range(3):
        first.step(batch(trajectories, seed))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second = ensemble(matrices, base, config)
    second.load_state_tensors(saved, first.optimiser_steps)
    for both in (first, second):
        both.step(batch(trajectories, 3))
    assert distance(first.export(base), second.export(base)) == 0
    damaged = {name: t for name, t in saved.items() if not name.startswith("1/weight")}
    with pytest.raises(AdaSpecError, match="damaged"):
        second.load_state_tensors(damaged, 3)


def test_what_is_remembered_is_recalled_and_trained_further(
    matrices: TargetMatrices, base: dict[str, Tensor], trajectories: list[Trajectory]
) -> None:
    settings = EnsembleSection(rates=(1.0,), eagerness=4.0, play="leader", memories=2)
    both = ensemble(matrices, base, msgspec.structs.replace(CONFIG, ensemble=settings))
    assert both.trust == pytest.approx((0.25,) * 4)
    for seed in range(80):
        both.step(batch(trajectories, seed))
    learned = both._experts[0].export(base)
    both._memory.kept[1] = learned
    both.restart_from(base)  # as if other traffic had undone it
    for _ in range(12):
        both.observe(trajectories[:4])
    assert distance(both.export(base), learned) == 0
    assert distance(both._experts[0].export(base), learned) == 0
    assert both.trust[2] + both.trust[3] > 0.8
    saved = {name: tensor.clone() for name, tensor in both.state_tensors().items()}
    again = ensemble(matrices, base, msgspec.structs.replace(CONFIG, ensemble=settings))
    again.load_state_tensors(saved, both.optimiser_steps)
    kept = again._memory.kept[1]
    assert kept is not None
    assert distance(kept, learned) == 0
