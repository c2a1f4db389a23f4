"""The drift laboratory: learners compared on the same recorded feedback, without a server.

    python benchmarks/drift/lab.py RECORDING --drafter DIR --target DIR --learn optimiser.learning_rate=1e-3

reads the phases of a recording in order, chunk by chunk. Each chunk is first drafted with the
weights as they are (committed tokens per target pass, walked over a stretch of the response), then learned
from: what is measured was never trained on. The static drafter walks the same chunks.
"""  # noqa: E501

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from adaspec.drafters.checkpoint import read_drafter_config, read_tensors
from adaspec.drafters.network import BlockDrafter
from benchmarks.drift.recording import load_phase
from online.batch import sample_blocks
from online.config import LearnConfig
from online.gate import relative_gain, tokens_per_pass
from online.replay import ReplayBuffer
from online.shadow import Walk, walk
from online.target import TargetMatrices, load_target_matrices
from online.trainer import Trainer
from online.trajectory import Trajectory


def chunks(items: Sequence[Trajectory], size: int) -> Iterator[Sequence[Trajectory]]:
    """Consecutive pieces."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Laboratory:
    """A drafter, its target's matrices and the recorded phases."""

    def __init__(self, drafter: Path, target: Path, device: torch.device, passes: int) -> None:
        self.network = read_drafter_config(drafter)
        self.tensors = read_tensors(drafter)
        self.device = device
        self.passes = passes
        self.matrices: TargetMatrices = load_target_matrices(target, self.network, device)
        self._walker = self.new_drafter()

    def new_drafter(self) -> BlockDrafter:
        """A drafter with the base weights, float32."""
        drafter = BlockDrafter(self.network).to(self.device)
        drafter.load_state_dict(self.tensors)
        return drafter

    def walk(self, drafter: BlockDrafter, chunk: Sequence[Trajectory]) -> list[Walk]:
        """Simulated decoding of each response with the weights as they would be published."""
        weights = {n: p.detach().to(self.tensors[n].dtype) for n, p in drafter.named_parameters()}
        self._walker.load_state_dict(weights)
        return walk(self._walker, self.matrices, chunk, self.passes, 1 << 20)

    def learn(
        self, phases: dict[str, list[Trajectory]], config: LearnConfig, chunk: int, steps: int
    ) -> dict[str, Any]:
        """Walk and learn through all phases; ``steps`` optimiser steps after each chunk."""
        trainer = Trainer(self.new_drafter(), self.matrices, config)
        replay = ReplayBuffer(msgspec.structs.replace(config.replay, held_back=0.0))
        rng = np.random.default_rng(config.process.seed)
        walks: dict[str, list[Walk]] = {}
        seconds = 0.0
        for name, trajectories in phases.items():
            walks[name] = []
            for piece in chunks(trajectories, chunk):
                walks[name] += self.walk(trainer.drafter, piece)
                started = time.perf_counter()
                for trajectory in piece:
                    replay.add(trajectory)
                for _ in range(steps):
                    drawn = replay.draw(config.batch.trajectories, rng)
                    trainer.step(
                        [
                            sample_blocks(
                                t,
                                config.batch,
                                self.network.block_size,
                                config.objective.decay,
                                rng,
                            )
                            for t in drawn
                        ]
                    )
                seconds += time.perf_counter() - started
        return {"walks": walks, "seconds": seconds, "steps": trainer.steps}


def configured(changes: Sequence[str]) -> LearnConfig:
    """The learner's defaults with ``section.key=value`` changes."""
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


def report(walks: Sequence[Walk], static: Sequence[Walk], parts: int = 4) -> str:
    """Gain over static in consecutive parts of a phase, the last one with its interval."""
    size = -(-len(walks) // parts)
    gains = [
        relative_gain(walks[i : i + size], static[i : i + size], 0.95)
        for i in range(0, len(walks), size)
    ]
    last = gains[-1]
    return (
        f"static {tokens_per_pass(static):.2f}; gain "
        + " ".join(f"{gain.estimate:+.1%}" for gain in gains)
        + f" [{last.low:+.1%}, {last.high:+.1%}]"
    )


def main() -> None:
    """Run every variant on the recording and print its gains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--learn", nargs="*", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[8])
    parser.add_argument("--passes", type=int, default=64, help="walked on each trajectory")
    parser.add_argument("--limit", type=int, default=None, help="of each phase")
    options = parser.parse_args()
    lab = Laboratory(options.drafter, options.target, torch.device(options.device), options.passes)
    phases = {
        path.name: list(load_phase(path))[: options.limit]
        for path in sorted(options.recording.iterdir())
        if path.is_dir() and path.name[0].isdigit()
    }
    base = lab.new_drafter()
    static = {
        name: [w for piece in chunks(t, options.chunk) for w in lab.walk(base, piece)]
        for name, t in phases.items()
    }
    for changes in options.learn or [[]]:
        for steps in options.steps:
            result = lab.learn(phases, configured(changes), options.chunk, steps)
            print(f"{' '.join(changes) or 'defaults'}, {steps} steps a chunk: "
                  f"{result['seconds']:.0f} s for {result['steps']} steps")  # fmt: skip
            for name in phases:
                print(f"  {name}: {report(result['walks'][name], static[name])}", flush=True)


if __name__ == "__main__":
    main()
