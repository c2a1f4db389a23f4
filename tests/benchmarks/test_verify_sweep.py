"""The benchmark of the verify length: who follows which policy, and what is made of the runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from adaspec.config import VerifyConfig
from adaspec.errors import AdaSpecError
from adaspec.load.client import RequestOutcome, Sampling
from adaspec.load.runner import LoadPlan, LoadRun
from adaspec.verify import GoodputPolicy, StepLoad, StepOutcome, VerifyShapes
from benchmarks.verify_length.report import Measured, draw, measured, table, verdicts
from benchmarks.verify_length.sweep import verify_config
from benchmarks.verify_length.switching_server import SwitchingPolicy, select

SHAPES = VerifyShapes(block_size=8, max_batch=4, ragged=True, on_host=True)
LOAD = StepLoad(("a",), 10, np.zeros(1, dtype=np.bool_))


def test_every_step_follows_the_policy_of_the_moment(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    select(file, VerifyConfig(length=3))
    policy = SwitchingPolicy(file, SHAPES, torch.device("cpu"))
    assert policy.plan(LOAD).tokens == 3
    select(file, VerifyConfig(length=1))
    assert policy.plan(LOAD).drafted is False
    select(file, VerifyConfig(policy="ema"))
    assert policy.plan(LOAD).tokens == 8


def test_late_outcomes_go_to_the_policy_that_planned_them(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    select(file, VerifyConfig(policy="goodput"))
    policy = SwitchingPolicy(file, SHAPES, torch.device("cpu"))
    goodput = policy.policy(VerifyConfig(policy="goodput"))
    assert isinstance(goodput, GoodputPolicy)
    plan = policy.plan(LOAD)
    select(file, VerifyConfig(length=4))
    other = policy.plan(LOAD)
    flags = {"lengths": np.array([4]), "accepted": np.array([2])}
    log_probs = np.full((1, 7), -0.1, np.float32)
    policy.observe(StepOutcome(plan, 4, 0.1, **flags, log_probs=log_probs))
    assert goodput.survival.fits == 1
    policy.observe(StepOutcome(other, 4, 0.1, **flags))
    assert goodput.survival.fits == 1
    assert policy.policy(VerifyConfig(policy="goodput")) is goodput


def test_contenders_have_names() -> None:
    assert verify_config("plain") is None
    assert verify_config("fixed-4") == VerifyConfig(policy="fixed", length=4)
    assert verify_config("ema") == VerifyConfig(policy="ema")
    for wrong in ("fixed", "fixed-0", "fast"):
        with pytest.raises(AdaSpecError, match="names no policy"):
            verify_config(wrong)


def run(tokens: int, wall_s: float, passes: int) -> LoadRun:
    outcome = RequestOutcome(
        started_s=0.0,
        first_token_s=1.0,
        finished_s=1.0 + tokens - 1,
        completion_tokens=tokens,
        target_passes=passes,
    )
    plan = LoadPlan(concurrency=1, requests=1, warmup=0, sampling=Sampling())
    return LoadRun(plan=plan, repeat=0, wall_s=wall_s, client_cpu_s=0.1, outcomes=(outcome,))


def test_closed_loops_of_a_load_count_together() -> None:
    found = measured("ema", "ramp", 0, [run(30, 10.0, 10), run(10, 10.0, 10)])
    assert (found.tokens_per_s, found.committed_per_pass) == (2.0, 2.0)
    assert found.tpot_p50_s == 1.0


def results() -> list[Measured]:
    speeds = {"plain": 10.0, "fixed-4": 20.0, "fixed-8": 16.0, "goodput": 19.0}
    return [
        Measured(
            contender=name,
            load=load,
            repeat=repeat,
            tokens_per_s=speed * (1 + repeat / 10),
            tpot_p50_s=1 / speed,
            tpot_p99_s=2 / speed,
            committed_per_pass=None,
            client_cpu_share=0.1,
            errors=0,
        )
        for load in ("c=1", "c=2", "ramp")
        for repeat in range(3)
        for name, speed in speeds.items()
    ]


def test_the_verdict_is_against_the_best_of_the_others() -> None:
    found = [verdict for verdict in verdicts(results()) if verdict.load == "ramp"]
    (best,) = [verdict for verdict in found if verdict.is_best_other]
    assert best.against == "fixed-4"
    assert best.ratio == pytest.approx(0.95)
    assert best.low <= best.ratio <= best.high
    assert {verdict.against for verdict in found} == {"plain", "fixed-4", "fixed-8"}


def test_a_repeat_that_is_still_running_is_left_out() -> None:
    whole = [r for r in results() if r.repeat < 2]
    started = [r for r in results() if r.repeat == 2 and r.contender == "fixed-4"]
    assert verdicts([*whole, *started]) == verdicts(whole)
    assert verdicts(started) == []


def test_table_and_picture_can_be_made(tmp_path: Path) -> None:
    assert table(results()).row_count == 12
    pytest.importorskip("matplotlib")
    draw(results(), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
