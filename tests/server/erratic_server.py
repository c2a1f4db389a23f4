"""``python -m tests.server.erratic_server``: a server whose verify lengths are drawn anew for every
request and step, with steps that draft nothing in between.

It writes down what the policy is shown afterwards and, if `RECORDS_VARIABLE` is set, the passes of
its draft model.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from adaspec.config import VerifyConfig
from adaspec.verify import (
    Allocation,
    DraftSignals,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyPolicy,
    VerifyShapes,
)
from tests.server.instrumented import launch, run_scheduler
from tests.server.recording_server import RECORDS_VARIABLE, recording

OUTCOMES_VARIABLE = "ADASPEC_TEST_OUTCOMES"

# Shares of steps; the rest is ragged. What is plain stays so for a few steps.
_PLAIN, _LONGEST_PLAIN_RUN = 0.15, 6
_UNIFORM, _FEW_DRAFTS = 0.1, 0.2


class Outcome(msgspec.Struct, frozen=True):
    """A `StepOutcome`, as lists."""

    requests: list[str]
    drafted: bool
    tokens: int
    seconds: float | None
    lengths: list[int] | None
    accepted: list[int] | None
    log_probs: list[list[float]] | None


class ErraticPolicy:
    """Draws everything at random; the outcomes go to a file."""

    reads_log_probs = True
    reads_length_ratio = False

    def __init__(self, block_size: int, outcomes: Path) -> None:
        self._block_size = block_size
        self._outcomes = outcomes
        self._random = np.random.default_rng(0)
        self._plain_left = 0

    def plan(self, load: StepLoad) -> StepPlan:
        if self._random.random() < _PLAIN:
            self._plain_left = int(self._random.integers(1, _LONGEST_PLAIN_RUN + 1))
        if self._plain_left:
            self._plain_left -= 1
            return StepPlan(load, False, load.batch, 0, "fixed")
        drafts = self._block_size - 1
        if self._random.random() < _FEW_DRAFTS:
            drafts = int(self._random.integers(1, drafts + 1))
        return StepPlan(load, True, load.batch * (drafts + 1), drafts, "fixed")

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        batch, longest = plan.load.batch, plan.drafts + 1
        assert signals.log_probs is not None
        assert signals.log_probs.shape == (batch, plan.drafts)
        lengths = self._random.integers(1, longest + 1, batch)
        if self._random.random() < _UNIFORM:
            lengths[:] = lengths[0]
        return Allocation(torch.tensor(lengths, dtype=torch.int32), int(lengths.sum()))

    def observe(self, outcome: StepOutcome) -> None:
        def listed(array: np.ndarray | None) -> Any:
            return None if array is None else array.tolist()

        line = Outcome(
            list(outcome.plan.load.requests),
            outcome.plan.drafted,
            outcome.tokens,
            outcome.seconds,
            listed(outcome.lengths),
            listed(outcome.accepted),
            listed(outcome.log_probs),
        )
        with self._outcomes.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def drafter_changed(self) -> None: ...


def read_outcomes(path: Path) -> list[Outcome]:
    """What the policy was shown so far, in its order."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Outcome) for line in lines if line.endswith(b"\n")]


def run_erratic_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    run_scheduler(_erratic, *args, **kwargs)


def _erratic(base: type) -> type:
    class ErraticWorker(base):  # type: ignore[misc]
        def make_policy(
            self, config: VerifyConfig, shapes: VerifyShapes, device: torch.device
        ) -> VerifyPolicy:
            return ErraticPolicy(shapes.block_size, Path(os.environ[OUTCOMES_VARIABLE]))

    return recording(ErraticWorker) if RECORDS_VARIABLE in os.environ else ErraticWorker


if __name__ == "__main__":
    launch(run_erratic_scheduler)
