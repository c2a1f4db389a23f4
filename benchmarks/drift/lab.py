"""The drift laboratory: learning algorithms compared on the same recorded feedback.

    python -m benchmarks.drift.lab RECORDING --target DIR --out lab.json --arm default --arm osd \
        --scenario abrupt --seed 0 --seed 1

A recording (`record.py`) holds traffic of a domain that the drafter knows and of a new one. A
scenario brings their requests in some order. Each chunk is first drafted with the weights as they
are (committed tokens per target pass over a stretch of every response), then learned from: what is
measured was never trained on. There is no server, and no gate unless ``--gated`` asks for it: what
an algorithm does, it shows.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.drafters.checkpoint import read_drafter_config, read_tensors
from adaspec.feedback import HiddenTeacher
from adaspec.load.machine import machine_facts
from adaspec.versions import BASE
from benchmarks.drift.arms import ARMS, STATIC
from benchmarks.drift.picture import draw
from benchmarks.drift.recording import load_phase
from benchmarks.drift.report import summarise, table
from benchmarks.drift.runs import Job, Run
from benchmarks.drift.scenarios import SCENARIOS, Request, scenario
from online.batch import sample_blocks
from online.config import LearnConfig
from online.ensemble import build_training
from online.evaluator import Evaluator
from online.gate import judge, tokens_per_pass
from online.replay import ReplayBuffer
from online.shadow import Walk
from online.target import load_target_matrices
from online.trainer import Training
from online.trajectory import Trajectory

_Item = TypeVar("_Item")
_LONG = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What all arms have in common.

    Attributes:
        learn: ``section.key=value`` changes of the learner's defaults.
        chunk: requests between two visits to the weights.
        steps: optimiser steps after each chunk.
        passes: target passes walked on each request.
        requests: of each domain, at most.
        forgetting: requests of the known domain, in no scenario, drafted at the very end.
        gated: only weights that pass the learner's gate are played.
    """

    recording: Path
    drafter: Path
    target: Path
    device: str
    learn: tuple[str, ...]
    chunk: int
    steps: int
    passes: int
    requests: int
    forgetting: int
    gated: bool


class Laboratory:
    """A drafter, its target's matrices and the recorded traffic."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.network = read_drafter_config(settings.drafter)
        self.base = read_tensors(settings.drafter)
        device = torch.device(settings.device)
        self.matrices = load_target_matrices(settings.target, self.network, device)
        self.evaluator = Evaluator(self.network, self.matrices, settings.passes, _LONG)
        known, new = (
            list(load_phase(path))
            for path in sorted(settings.recording.iterdir())
            if path.is_dir() and path.name[0].isdigit()
        )
        self.unseen = known[: settings.forgetting]
        self.known = known[settings.forgetting :][: settings.requests]
        self.new = new[: settings.requests]

    def run(self, job: Job) -> Run:
        """Draft and learn through a scenario."""
        torch.manual_seed(job.seed)
        settings = self.settings
        changes = (*settings.learn, *ARMS.get(job.arm, ()), f"process.seed={job.seed}")
        config = configured(changes)
        requests = self.requests(job)
        training = build_training(self.network, self.matrices, config, self.base, self.evaluator)
        keep = {} if settings.gated else {"held_back": 0.0, "fresh": 0}
        replay = ReplayBuffer(msgspec.structs.replace(config.replay, **keep))
        rng = np.random.default_rng(job.seed)
        walks: list[Walk] = []
        marks: list[dict[str, Tensor]] = []
        seconds = 0.0
        gate = Gate(self, config) if settings.gated else None
        for piece in chunks(requests, settings.chunk):
            trajectories = [request.trajectory for request in piece]
            played = gate.live if gate else training.export(self.base)
            if walks and piece[0].phase != requests[len(walks) - settings.chunk].phase:
                marks.append(played)
            walks += self.evaluator.candidate(played, trajectories)
            if job.arm == STATIC:
                continue
            started = time.perf_counter()
            for trajectory in trajectories:
                replay.add(self.heard(trajectory, config))
            training.observe(replay.take_new())
            for _ in range(settings.steps if replay.released else 0):
                decay = config.objective.position_decay
                training.step(
                    [
                        sample_blocks(t, config.batch, self.network.block_size, decay, rng)
                        for t in replay.draw(config.batch.trajectories, rng)
                    ]
                )
            if gate and training.steps >= config.gate.every_steps * (gate.judged + 1):
                gate.judge(training, replay)
            seconds += time.perf_counter() - started
        final = gate.live if gate else training.export(self.base)
        everything = [request.trajectory for request in requests]
        kept = [*marks, final] if job.arm == "default" else []
        return Run(
            job=job,
            phases=[request.phase for request in requests],
            walks=walks,
            afterwards=self.evaluator.candidate(final, self.unseen),
            seconds=seconds,
            steps=training.steps,
            skipped=training.skipped_steps,
            checkpoints=[self.evaluator.candidate(weights, everything) for weights in kept],
        )

    def requests(self, job: Job) -> list[Request]:
        """The scenario's requests."""
        return scenario(job.scenario, self.known, self.new, job.seed)

    def heard(self, trajectory: Trajectory, config: LearnConfig) -> Trajectory:
        """The trajectory with the teacher's rows as an intake with these settings keeps them."""
        teacher = trajectory.teacher
        if config.intake.top_k and isinstance(teacher, HiddenTeacher):
            condensed = self.matrices.condense(teacher, config.intake.top_k)
            return replace(trajectory, teacher=condensed)
        return trajectory


class Gate:
    """The learner's gate: what is played, and what decides about it.

    Attributes:
        live: weights that are played.
        judged: candidates so far.
    """

    def __init__(self, laboratory: Laboratory, config: LearnConfig) -> None:
        self.live = self._base = laboratory.base
        self.judged = 0
        self._number = self._published = BASE
        self._config = config.gate
        self._evaluator = Evaluator(
            laboratory.network, laboratory.matrices, self._config.passes, _LONG
        )

    def judge(self, training: Training, replay: ReplayBuffer) -> None:
        """Offer the weights in training, and act on the verdict as `online.learner` does."""
        self.judged += 1
        unseen = replay.unseen(self._config.max_requests)
        candidate = training.export(self._base)
        verdict = judge(
            self._evaluator.candidate(candidate, unseen),
            self._evaluator.version(self._number, self.live, unseen),
            self._evaluator.version(BASE, self._base, unseen),
            self._number,
            self._config,
        )
        if verdict.action == "publish":
            self._number = self._published = self._published + 1
            self.live = candidate
        elif verdict.action == "base":
            self._number, self.live = BASE, self._base
            training.restart_from(self._base)
        elif verdict.over_incumbent.high < 0:
            training.restart_from(self.live)
        self._evaluator.forget([BASE, self._number], unseen)


def chunks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Consecutive pieces."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def configured(changes: Sequence[str]) -> LearnConfig:
    """The learner's defaults with ``section.key=value`` changes, later ones over earlier ones."""
    tree: dict[str, Any] = {}
    for change in changes:
        path, _, value = change.partition("=")
        node = tree
        *sections, key = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        try:
            node[key] = json.loads(value)
        except json.JSONDecodeError:
            node[key] = value
    return msgspec.convert(tree, LearnConfig)


_laboratory: Laboratory | None = None


def open_laboratory(settings: Settings) -> None:
    """Set up a worker process: one thread each, so that jobs do not disturb each other."""
    global _laboratory
    torch.set_num_threads(1)
    _laboratory = Laboratory(settings)


def run_job(job: Job) -> Run:
    """In a worker process."""
    assert _laboratory is not None
    return _laboratory.run(job)


def main() -> None:
    """Run every arm on every scenario and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--drafter", type=Path, default=BUNDLED_DRAFTER)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="that learns and drafts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--arm", action="append", choices=sorted(ARMS))
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--learn", nargs="*", default=[], metavar="KEY=VALUE", help="of all arms")
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--passes", type=int, default=32, help="walked on each request")
    parser.add_argument("--requests", type=int, default=96, help="of each domain")
    parser.add_argument("--forgetting", type=int, default=24, help="requests of the known domain")
    parser.add_argument("--gated", action="store_true", help="play only what passes the gate")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    settings = Settings(
        options.recording, options.drafter, options.target, options.device, tuple(options.learn),
        options.chunk, options.steps, options.passes, options.requests, options.forgetting,
        options.gated,
    )  # fmt: skip
    arms = [STATIC, *(options.arm or ARMS)]
    jobs = [
        Job(arm, name, seed)
        for seed in options.seed or [0]
        for name in options.scenario or SCENARIOS
        for arm in arms
    ]
    runs: list[Run] = []
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), open_laboratory, (settings,)
    ) as pool:
        for run in pool.map(run_job, jobs):
            runs.append(run)
            print(f"{run.job}: {tokens_per_pass(run.walks):.3f}, {run.seconds:.0f} s", flush=True)
            document = {
                "machine": machine_facts(),
                "settings": {key: str(value) for key, value in asdict(settings).items()},
                "arms": {arm: list(ARMS.get(arm, ())) for arm in arms},
                "runs": [asdict(run) for run in runs],
            }
            options.out.write_text(json.dumps(document) + "\n")
    rows = summarise(runs, options.chunk)
    options.out.write_text(json.dumps(document | {"summary": rows}) + "\n")
    print(table(rows))
    if options.plot is not None:
        draw(runs, options.chunk, options.plot)


if __name__ == "__main__":
    main()
