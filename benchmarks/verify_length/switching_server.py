"""``python -m benchmarks.verify_length.switching_server``: one server, many verify-length policies.

Launcher, processes and worker are the stock ones. Only the policy is replaced: by one that asks,
before every step, the policy named in the file that `POLICY_FILE_VARIABLE` names. Each policy keeps
what it has learned while others have their turn, and sees the outcomes of its own steps alone.
"""

import os
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
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
    make_policy,
)
from benchmarks.stock_server import serve

POLICY_FILE_VARIABLE = "ADASPEC_BENCHMARK_POLICY"


class SwitchingPolicy:
    """The policies of a benchmark behind one; the file holds a `VerifyConfig` as JSON."""

    reads_log_probs = True
    reads_length_ratio = False

    def __init__(self, file: Path, shapes: VerifyShapes, device: torch.device) -> None:
        self._file = file
        self._shapes = shapes
        self._device = device
        self._seen = -1  # st_mtime_ns
        self._policies: dict[bytes, VerifyPolicy] = {}
        self._current = self._read()
        self._planned: deque[tuple[StepPlan, VerifyPolicy]] = deque(maxlen=16)

    def plan(self, load: StepLoad) -> StepPlan:
        """See `VerifyPolicy`."""
        self._current = self._read()
        self.reads_log_probs = self._current.reads_log_probs
        plan = self._current.plan(load)
        self._planned.append((plan, self._current))
        return plan

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        """See `VerifyPolicy`."""
        return self._current.allocate(plan, signals)

    def observe(self, outcome: StepOutcome) -> None:
        """See `VerifyPolicy`; goes to the policy that planned the step."""
        while self._planned:
            plan, policy = self._planned.popleft()
            if plan is outcome.plan:
                policy.observe(outcome)
                return

    def drafter_changed(self) -> None:
        """See `VerifyPolicy`."""
        for policy in self._policies.values():
            policy.drafter_changed()

    def _read(self) -> VerifyPolicy:
        changed = self._file.stat().st_mtime_ns
        if changed == self._seen:
            return self._current
        self._seen = changed
        return self.policy(msgspec.json.decode(self._file.read_bytes(), type=VerifyConfig))

    def policy(self, config: VerifyConfig) -> VerifyPolicy:
        """The policy of a configuration, with all that it has learned."""
        name = msgspec.json.encode(config)
        if name not in self._policies:
            self._policies[name] = make_policy(config, self._shapes, self._device)
        return self._policies[name]


def select(file: Path, config: VerifyConfig) -> None:
    """Let the server that reads ``file`` follow this policy from its next step on."""
    staged = file.with_suffix(".part")
    staged.write_bytes(msgspec.json.encode(config))
    staged.rename(file)


def run_switching_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_patches.worker import worker

    class SwitchingWorker(worker.AdaSpecWorker):  # type: ignore[misc]
        def make_policy(
            self, config: VerifyConfig, shapes: VerifyShapes, device: torch.device
        ) -> VerifyPolicy:
            return SwitchingPolicy(Path(os.environ[POLICY_FILE_VARIABLE]), shapes, device)

        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            self.seed(self.lengths.policy.policy(VerifyConfig(policy="goodput")))

    worker.AdaSpecWorker = SwitchingWorker  # type: ignore[misc]
    run_scheduler_process(*args, **kwargs)


if __name__ == "__main__":
    serve(run_switching_scheduler)
