"""How long `goodput` thinks: its host time per step, against the time of the step.

    python -m benchmarks.verify_length.planning

Requests and verdicts are simulated; the policy, its clock and its tensors are real. Steps take the
times that are given for each batch size, as on a GPU: tiers of graphs, signals on the device, so
that `plan` and `observe` are all the host does for the policy beside launching `allocate`.
"""

import time
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer

from adaspec.config import GoodputConfig
from adaspec.verify import DraftSignals, GoodputPolicy, StepLoad, StepOutcome, VerifyShapes

_BLOCK, _MOST_REQUESTS = 16, 128
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
_SETTLED = 300  # steps before the measured ones
_REJECTION = 0.35  # of a draft


@dataclass(frozen=True)
class Thinking:
    """Mean microseconds of a step, and their share of its time."""

    batch: int
    planning: float
    learning: float
    share: float


def think(batch: int, step_s: float, steps: int) -> Thinking:
    """Run the policy on ``steps`` steps of ``batch`` requests that take ``step_s`` seconds each."""
    tiers = tuple(_BLOCK * b for b in _BATCHES)
    shapes = VerifyShapes(_BLOCK, _MOST_REQUESTS, ragged=True, token_tiers=tiers, batch_tiers=tiers)
    policy = GoodputPolicy(GoodputConfig(), shapes, torch.device("cpu"))
    random = np.random.default_rng(0)
    requests = tuple(f"request-{i}" for i in range(batch))
    sampled = np.zeros(batch, dtype=np.bool_)
    planning = learning = 0.0
    for step in range(_SETTLED + steps):
        load = StepLoad(requests, 300 * batch, sampled)
        begun = time.perf_counter()
        plan = policy.plan(load)
        planned = time.perf_counter()
        seconds = step_s * float(np.exp(0.03 * random.standard_normal()))
        outcome = StepOutcome(plan, batch, seconds)
        if plan.drafted:
            log_probs = np.log(random.uniform(0.3, 1.0, (batch, plan.drafts))).astype(np.float32)
            signals = DraftSignals(torch.from_numpy(log_probs))
            lengths = policy.allocate(plan, signals).lengths.numpy().astype(np.int64)
            accepted = np.minimum(random.geometric(_REJECTION, batch) - 1, lengths - 1)
            seconds *= 1 + 0.5 * lengths.sum() / (batch * _BLOCK)
            outcome = StepOutcome(plan, plan.tokens, seconds, lengths, accepted, log_probs)
        known = time.perf_counter()
        policy.observe(outcome)
        if step >= _SETTLED:
            planning += planned - begun
            learning += time.perf_counter() - known
    mean = (planning + learning) / steps
    return Thinking(batch, 1e6 * planning / steps, 1e6 * learning / steps, mean / step_s)


def main(
    step_ms: Annotated[
        list[float] | None, typer.Option(help="For 1, 8, 32 and 128 requests.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
) -> None:
    """Print the host time of planning and learning at four batch sizes."""
    times = step_ms or [4.0, 5.0, 8.0, 20.0]
    print("requests  step ms  planning µs  learning µs  share of a step")
    for batch, milliseconds in zip((1, 8, 32, 128), times, strict=True):
        found = think(batch, milliseconds / 1e3, steps)
        print(
            f"{batch:>8}  {milliseconds:>7.1f}  {found.planning:>11.1f}  {found.learning:>11.1f}"
            f"  {found.share:>15.2%}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
