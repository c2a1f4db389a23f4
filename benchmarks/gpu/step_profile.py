"""Where the time of a decode step goes, from PyTorch profiles that SGLang takes of itself.

    python -m benchmarks.gpu.step_profile TRACE.trace.json.gz ...

A trace is cut into the launches of captured graphs and what is launched between them. The graph
with the most kernels is the target's pass; where there is another, it is the draft pass.
"""

import gzip
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling
from adaspec.load.runner import LoadPlan, run_plans

_SETTLED_S = 0.7  # from the first request until steps are typical
_TRACE_TIMEOUT_S = 60.0
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class StepProfile:
    """Mean microseconds of a step.

    Attributes:
        steps: that the trace holds.
        wall: from one target pass to the next.
        target, draft: of the GPU in captured graphs.
        eager: of the GPU outside of graphs.
        idle: of the GPU.
        launches: kernels and copies launched outside of graphs.
        eager_kernels: the dearest by name: microseconds and number.
    """

    steps: int
    wall: float
    target: float
    draft: float
    eager: float
    idle: float
    launches: float
    eager_kernels: dict[str, tuple[float, float]] = field(default_factory=dict)


def capture(
    url: str,
    prompts: Sequence[str],
    *,
    name: str,
    directory: Path,
    concurrency: int,
    steps: int,
    with_stack: bool = False,
) -> Path:
    """Put a server under load and have it profile so many of its steps.

    Raises:
        AdaSpecError: if no trace appears; the server must write to this machine's disk.
    """
    plan = LoadPlan(
        concurrency=concurrency,
        requests=2 * concurrency,
        warmup=0,
        sampling=Sampling(max_tokens=512, temperature=0.0),
    )
    load = threading.Thread(target=run_plans, args=(url, prompts, [plan]))
    load.start()
    time.sleep(_SETTLED_S)
    body = {
        "output_dir": str(directory.resolve()),
        "num_steps": steps,
        "with_stack": with_stack,
        "profile_prefix": name,
    }
    httpx.post(f"{url}/start_profile", json=body, timeout=_TRACE_TIMEOUT_S).raise_for_status()
    load.join()
    deadline = time.monotonic() + _TRACE_TIMEOUT_S
    while time.monotonic() < deadline:
        if found := sorted(directory.glob(f"{name}-*.trace.json.gz")):
            return found[-1]
        time.sleep(0.2)
    raise AdaSpecError(f"{url} wrote no trace to {directory} in {_TRACE_TIMEOUT_S:.0f} s.")


def read(trace: Path) -> StepProfile:
    """Account for the steps of a trace.

    Raises:
        AdaSpecError: if it holds fewer than three target passes.
    """
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") == "cuda_runtime" and e["name"].startswith("cudaGraphLaunch")
    }
    graphs: dict[int, list[dict]] = defaultdict(list)
    eager = []
    for event in (e for e in events if e.get("cat") in _GPU_WORK):
        correlation = event["args"].get("correlation")
        (graphs[correlation] if correlation in launched else eager).append(event)
    most = max((len(kernels) for kernels in graphs.values()), default=0)
    target = {c: kernels for c, kernels in graphs.items() if len(kernels) > most / 2}
    draft = {c: kernels for c, kernels in graphs.items() if c not in target}
    starts = sorted(min(e["ts"] for e in kernels) for kernels in target.values())
    if len(starts) < 3:
        raise AdaSpecError(f"{trace} holds {len(starts)} target passes; three are the least.")
    begin, end, steps = starts[0], starts[-1], len(starts) - 1

    def busy(events: Sequence[dict]) -> float:
        """Microseconds in which any of them runs."""
        total, reached = 0.0, begin
        for event in sorted(events, key=lambda e: e["ts"]):
            start, stop = max(event["ts"], reached), min(event["ts"] + event["dur"], end)
            total += max(stop - start, 0.0)
            reached = max(reached, stop)
        return total / steps

    of_target = [e for kernels in target.values() for e in kernels]
    of_draft = [e for kernels in draft.values() for e in kernels]
    inside = [e for e in eager if begin <= e["ts"] < end]
    time_of, count_of = Counter[str](), Counter[str]()
    for event in inside:
        time_of[event["name"]] += event["dur"] / steps
        count_of[event["name"]] += 1
    wall = (end - begin) / steps
    return StepProfile(
        steps=steps,
        wall=wall,
        target=busy(of_target),
        draft=busy(of_draft),
        eager=busy(inside),
        idle=wall - busy([*of_target, *of_draft, *inside]),
        launches=len(inside) / steps,
        eager_kernels={n: (t, count_of[n] / steps) for n, t in time_of.most_common(12)},
    )


def table(profiles: dict[str, StepProfile]) -> str:
    """One line for each profile."""
    lines = ["µs a step                  wall  target   draft   eager    idle  launches  steps"]
    lines += [
        f"{name:<24} {p.wall:>6.0f}  {p.target:>6.0f}  {p.draft:>6.0f}  {p.eager:>6.0f}"
        f"  {p.idle:>6.0f}  {p.launches:>8.1f}  {p.steps:>5}"
        for name, p in profiles.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    found = {Path(name).name.split(".")[0]: read(Path(name)) for name in sys.argv[1:]}
    print(table(found))
    for name, profile in found.items():
        print(name)
        for kernel, (micros, count) in profile.eager_kernels.items():
            print(f"  {micros:>7.1f} µs  {count:>5.1f} x  {kernel[:100]}")
