"""The drift laboratory: scenarios, figures, and runs on a tiny recording."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adaspec.drafters.checkpoint import save_drafter
from adaspec.drafters.network import BlockDrafter
from benchmarks.drift import metrics
from benchmarks.drift.arms import ARMS, STATIC
from benchmarks.drift.lab import Job, Laboratory, Settings, configured
from benchmarks.drift.picture import draw
from benchmarks.drift.recording import load_phase, save_trajectory
from benchmarks.drift.report import summarise, table
from benchmarks.drift.runs import Run
from benchmarks.drift.scenarios import SCENARIOS, Request, scenario
from online.assembly import Assembler
from online.config import IntakeSection
from online.shadow import Walk
from online.target import TargetMatrices
from online.trajectory import Trajectory
from tests.online.world import (
    DRAFTER,
    TinyTarget,
    captures,
    random_prompt,
    records_of,
    save_target,
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two phases of twelve requests, a target and a drafter, all tiny."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("drift")
    target = TinyTarget(save_target(place / "target"))
    torch.manual_seed(1)
    drafter = BlockDrafter(DRAFTER)
    save_drafter(drafter, place / "drafter")
    matrices = TargetMatrices(target.embedding, target.lm_head)
    generator = torch.Generator().manual_seed(2)
    for phase in ("0-known", "1-new"):
        directory = place / "recording" / phase
        directory.mkdir(parents=True)
        prompts = {f"{phase}-{i}": random_prompt(generator) for i in range(12)}
        assembler = Assembler(IntakeSection(top_k=0), DRAFTER, matrices)
        for number, request in enumerate(target.requests(prompts, 24)):
            for record in records_of(captures(request, drafter, target, kind="hidden")):
                for trajectory in assembler.add(record):  # type: ignore[arg-type]
                    save_trajectory(directory / f"{number:06d}.safetensors", trajectory)
    return place


def settings(place: Path, gated: bool = False) -> Settings:
    return Settings(
        recording=place / "recording",
        drafter=place / "drafter",
        target=place / "target",
        device="cpu",
        learn=(
            "optimiser.learning_rate=3e-3",
            "batch.blocks=8",
            "replay.fresh=3",
            "gate.every_steps=6",
            "gate.min_requests=2",
        ),
        chunk=4,
        steps=6,
        passes=6,
        requests=10,
        forgetting=2,
        gated=gated,
    )


def test_recordings_come_back_as_they_were(recording: Path) -> None:
    phase = list(load_phase(recording / "recording" / "0-known"))
    assert len(phase) == 12
    assert any(block.rejected >= 0 for t in phase for block in t.blocks)
    copy = recording / "copy.safetensors"
    save_trajectory(copy, phase[0])
    again = next(load_phase(recording))
    assert again.blocks == phase[0].blocks
    assert torch.equal(again.tokens, phase[0].tokens)


def test_scenarios_bring_each_request_once_and_in_phases(recording: Path) -> None:
    lab = Laboratory(settings(recording))
    assert (len(lab.unseen), len(lab.known), len(lab.new)) == (2, 10, 10)
    phases = {}
    for name in SCENARIOS:
        requests = scenario(name, lab.known, lab.new, seed=0)
        ids = [request.trajectory.request for request in requests]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & {t.request for t in lab.unseen}
        phases[name] = list(dict.fromkeys(request.phase for request in requests))
        again = scenario(name, lab.known, lab.new, seed=1)
        assert [r.phase for r in again] == [r.phase for r in requests]
        assert [r.trajectory for r in again] != [r.trajectory for r in requests]
    assert phases == {
        "stationary": ["known"],
        "abrupt": ["known", "new"],
        "gradual": ["mixed", "new"],
        "recurring": ["known", "new", "known again", "new again"],
    }


def test_the_gradual_share_of_the_new_domain_rises(trajectory: Trajectory) -> None:
    known, new = ([replace(trajectory, request=f"{d}{i}") for i in range(80)] for d in "kn")
    mixed = [r for r in SCENARIOS["gradual"](known, new) if r.phase == "mixed"]
    shares = [_share(mixed[start : start + 20]) for start in (0, 20, 40, 60)]
    assert shares == sorted(shares)
    assert shares[0] < 0.25
    assert shares[-1] > 0.75


def _share(requests: list[Request]) -> float:
    return sum(r.trajectory.request.startswith("n") for r in requests) / len(requests)


@pytest.fixture
def trajectory(recording: Path) -> Trajectory:
    return next(load_phase(recording / "recording" / "0-known"))


def test_regret_is_against_the_best_checkpoint_of_each_phase() -> None:
    ours = {"a": [Walk(100, 50)], "b": [Walk(100, 40)]}
    first = {"a": [Walk(100, 40)], "b": [Walk(100, 80)]}
    second = {"a": [Walk(100, 90)], "b": [Walk(100, 25)]}
    assert metrics.regret(ours, [first, second]) == pytest.approx(1000 * (10 + 15) / 200)
    assert metrics.regret(first, [first]) == 0


def test_recovery_is_when_most_of_the_final_gain_is_reached() -> None:
    static = [Walk(20, 10 + i % 2) for i in range(36)]
    course = [10 - min(i // 4, 5) for i in range(36)]  # passes fall until request 20
    ours = [Walk(20, passes + i % 2) for i, passes in enumerate(course)]
    assert metrics.requests_to_recover(ours, static, chunk=4) == 20
    assert metrics.requests_to_recover(static, static, chunk=4) is None


@pytest.mark.parametrize("gated", [False, True])
def test_runs_draft_before_they_learn_and_sum_up(
    recording: Path, gated: bool, tmp_path: Path
) -> None:
    lab = Laboratory(settings(recording, gated))
    runs = [lab.run(Job(arm, "abrupt", 0)) for arm in (STATIC, "default", "memory")]
    static, default, memory = runs
    # Nothing has been learned when the first chunk is drafted.
    assert static.walks[:4] == default.walks[:4] == memory.walks[:4]
    assert static.steps == 0
    chunks = -(-len(default.walks) // 4)
    # Where a gate judges by fresh requests, the first ones are not trained on at once.
    assert default.steps == 6 * chunks or (gated and 6 <= default.steps < 6 * chunks)
    assert default.phases.count("new") == 10
    assert len(default.checkpoints) == 2
    assert len(default.checkpoints[0]) == len(default.walks)
    rows = summarise(runs, chunk=4)
    assert [row["arm"] for row in rows] == [STATIC, "default", "memory"]
    assert rows[0]["gain"]["estimate"] == 0
    assert all(regret >= 0 for regret in rows[0]["regret"])
    assert "| abrupt | default |" in table(rows)
    pytest.importorskip("matplotlib")
    draw(runs, 4, tmp_path / "lab.png")
    assert (tmp_path / "lab.png").stat().st_size > 0


def test_learning_shows_where_there_is_no_gate(recording: Path) -> None:
    lab = Laboratory(replace(settings(recording), steps=40))
    run: Run = lab.run(Job("default", "stationary", 0))
    static = lab.run(Job(STATIC, "stationary", 0))
    assert run.walks != static.walks
    assert run.seconds > 0


def test_every_arm_is_a_valid_configuration() -> None:
    for changes in ARMS.values():
        configured(changes)
