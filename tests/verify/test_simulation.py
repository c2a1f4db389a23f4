"""The whole policy against every fixed length, on servers whose truth is known."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch

from adaspec.config import GoodputConfig
from adaspec.verify import CostSample, GoodputPolicy, VerifyShapes
from adaspec.verify.cost import CostModel
from tests.verify.world import (
    BLOCK,
    EASY,
    HARD,
    TIERS,
    Server,
    StepTime,
    World,
    block_commits,
    cpu_time,
    fixed_rate,
    gpu_time,
    saturated_time,
)

LENGTHS = range(1, BLOCK + 1)
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
RAMP = (*CONCURRENCY, *CONCURRENCY[-2::-1])

ON_CPU = VerifyShapes(BLOCK, 128, ragged=True, on_host=True)
UNIFORM = VerifyShapes(BLOCK, 128, ragged=False)
TIERED = VerifyShapes(BLOCK, 128, ragged=True, token_tiers=TIERS)
SERVERS = pytest.mark.parametrize(
    ("step_time", "shapes"),
    [(cpu_time, ON_CPU), (gpu_time, TIERED), (gpu_time, UNIFORM), (saturated_time, UNIFORM)],
    ids=["cpu", "gpu-tiers", "gpu-uniform", "saturated"],
)


def steps_at(concurrency: int) -> int:
    """Enough blocks to compare rates."""
    return max(60, 500 // concurrency)


def best_fixed(world: World, concurrency: int, shift: float = 0.0) -> float:
    return max(fixed_rate(world, length, concurrency, shift) for length in LENGTHS)


def serve(
    world: World, shapes: VerifyShapes, clock: Callable[[], float] = lambda: 0.0
) -> tuple[Server, GoodputPolicy]:
    """A server whose planning takes no time of its own, unless the ``clock`` says so."""
    policy = GoodputPolicy(
        GoodputConfig(),
        shapes,
        torch.device("cpu"),
        has_confidence=world.has_confidence,
        clock=clock,
    )
    server = Server(world, shapes, policy)
    server.probe()
    return server, policy


@pytest.mark.parametrize("concurrency", CONCURRENCY)
@SERVERS
def test_no_fixed_length_is_better_at_any_concurrency(
    step_time: StepTime, shapes: VerifyShapes, concurrency: int
) -> None:
    """All exploration included, after a short warm-up."""
    server, _ = serve(World(step_time=step_time), shapes)
    server.run(concurrency, 100)
    result = server.run(concurrency, 2 * steps_at(concurrency))
    assert result.rate >= 0.98 * result.best_fixed_rate


@SERVERS
def test_nothing_is_lost_at_concurrency_one(step_time: StepTime, shapes: VerifyShapes) -> None:
    server, _ = serve(World(step_time=step_time), shapes)
    server.run(1, 100)
    result = server.run(1, 1500)
    assert result.rate >= 0.99 * result.best_fixed_rate


@SERVERS
def test_it_beats_every_fixed_length_over_a_ramp(step_time: StepTime, shapes: VerifyShapes) -> None:
    """Load rises to 128 and falls again, on one server that has seen nothing but its probe.

    Compared is the time for as much work at every stage.
    """
    server, _ = serve(World(step_time=step_time), shapes)
    stages = [server.run(concurrency, steps_at(concurrency)) for concurrency in RAMP]
    ours = sum(1 / stage.rate for stage in stages)
    for i in range(BLOCK):
        fixed = sum(stage.seconds_at[i] / stage.tokens_at[i] for stage in stages)
        assert ours < fixed


@SERVERS
def test_it_beats_every_fixed_length_on_easy_and_hard_requests_together(
    step_time: StepTime, shapes: VerifyShapes
) -> None:
    """Over the ramp, half of the requests easy and half of them hard."""
    world = World(kinds=(EASY, HARD), step_time=step_time)
    server, _ = serve(world, shapes)
    ours = sum(1 / server.run(c, 2 * steps_at(c)).rate for c in RAMP)
    for length in LENGTHS:
        assert ours < sum(1 / fixed_rate(world, length, c) for c in RAMP)


def test_ragged_lengths_follow_the_requests() -> None:
    """Where tokens cost, requests of both kinds in one step get different lengths."""
    world = World(kinds=(EASY, HARD), step_time=cpu_time)
    server, _ = serve(world, ON_CPU)
    server.run(4, 300)
    assert block_commits(EASY, BLOCK) > 3 * block_commits(HARD, BLOCK)
    assert server.run(4, 600).rate > 1.05 * best_fixed(world, 4)


def test_it_works_without_confidence() -> None:
    world = World(kinds=(EASY, HARD), step_time=gpu_time, has_confidence=False)
    server, _ = serve(world, TIERED)
    server.run(64, 100)
    assert server.run(64, 200).rate >= 0.98 * best_fixed(world, 64)


@pytest.mark.parametrize("concurrency", [8, 32])
def test_better_drafts_are_noticed_while_plain_decoding_pays(concurrency: int) -> None:
    """Drafting is off; then drafts become good, as after a new version, without any notice."""
    server, _ = serve(World(step_time=saturated_time), UNIFORM)
    server.log_odds_shift = -3.0
    server.run(concurrency, 60)
    before = server.run(concurrency, 600)
    assert before.plain_steps > 0.9 * before.steps
    assert before.rate >= 0.98 * before.best_fixed_rate
    server.log_odds_shift = 2.0
    server.run(concurrency, 1000)
    after = server.run(concurrency, 200)
    assert after.plain_steps < 0.1 * after.steps
    assert after.rate >= 0.97 * after.best_fixed_rate


def test_drafts_that_become_worse_are_noticed() -> None:
    server, _ = serve(World(step_time=saturated_time), UNIFORM)
    server.run(8, 300)
    server.log_odds_shift = -3.0
    server.run(8, 100)
    after = server.run(8, 600)
    assert after.rate >= 0.97 * after.best_fixed_rate


def test_a_slower_machine_is_followed() -> None:
    server, _ = serve(World(step_time=gpu_time), TIERED)
    server.run(64, 200)
    server.slowness = 2.0
    server.run(64, 50)
    result = server.run(64, 150)
    assert result.rate >= 0.98 * result.best_fixed_rate


@pytest.mark.parametrize("sampled", [0.0, 0.5])
def test_predictions_are_calibrated(sampled: float) -> None:
    world = World(kinds=(EASY, HARD), step_time=gpu_time, sampled=sampled)
    server, policy = serve(world, TIERED)
    server.run(16, 300)
    state = policy.state()
    assert state.greedy.mean_ece < 0.05
    if sampled:
        assert state.sampled.mean_ece < 0.05


def test_all_of_it_is_repeatable() -> None:
    """The same history leads to the same plans: nothing depends on a clock of its own."""
    world = World(kinds=(EASY, HARD), step_time=gpu_time)
    rates = set()
    for _ in range(2):
        server, _ = serve(world, TIERED)
        rates.add(server.run(16, 100).rate)
    assert len(rates) == 1


@pytest.mark.parametrize("concurrency", [1, 32])
def test_little_is_lost_when_planning_is_dear(concurrency: int) -> None:
    """One step in 16 is learned from when planning takes far more than its share of time."""
    seconds = count()
    server, policy = serve(World(step_time=gpu_time), TIERED, lambda: float(next(seconds)))
    server.run(concurrency, 400)
    fits = policy.survival.fits  # each of four steps
    result = server.run(concurrency, 800)
    assert result.rate >= 0.97 * result.best_fixed_rate
    assert 4 * (policy.survival.fits - fits) < 0.2 * 800


def test_times_are_learned_on_short_visits_even_when_planning_is_dear() -> None:
    """The probe found drafted steps of large batches twice as slow as they are."""
    seconds = count()
    server, policy = serve(World(step_time=gpu_time), TIERED, lambda: float(next(seconds)))
    policy.cost = policy._planner._cost = CostModel(BLOCK, 128)
    policy.cost.seed(
        CostSample(b, t, 0, d, gpu_time(b, t, 0, d) * (2.0 if d and b >= 64 else 1.0))
        for b, t, d in policy.probe_steps()
    )
    rates = []
    for _ in range(5):
        for load in (1, 8, 32, 128):
            result = server.run(load, 60)
            if load == 128:
                rates.append(result.rate / result.best_fixed_rate)
    assert float(np.mean(rates[1:])) >= 0.95


@pytest.mark.parametrize("concurrency", [8, 16])
def test_a_probe_that_was_wrong_about_plain_steps_is_found_out(concurrency: int) -> None:
    """Visits of thirty steps each, as many loads come and go; all but the first must be good."""
    server, policy = serve(World(step_time=cpu_time), ON_CPU)
    probed = [
        CostSample(b, t, 0, d, cpu_time(b, t, 0, d) * (1.0 if d else 1.6))
        for b, t, d in policy.probe_steps()
    ]
    policy.cost = policy._planner._cost = CostModel(BLOCK, 128)
    policy.cost.seed(probed)
    rates = []
    for _ in range(4):
        for load in (1, 2, 4, 8, 16, 32):
            result = server.run(load, 30)
            if load == concurrency:
                rates.append(result.rate / result.best_fixed_rate)
    assert float(np.mean(rates[1:])) >= 0.97


def test_without_a_probe_it_gets_there_by_itself() -> None:
    policy = GoodputPolicy(GoodputConfig(), TIERED, torch.device("cpu"), clock=lambda: 0.0)
    server = Server(World(step_time=gpu_time), TIERED, policy)
    server.run(32, 400)
    assert np.isfinite(policy.state().cost.noise)
    result = server.run(32, 200)
    assert result.rate >= 0.97 * result.best_fixed_rate
