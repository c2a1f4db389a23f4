"""What the tap costs: one server under a steady load, its tap open every other window of time.

    python -m benchmarks.online.tap_cost --out result.json --dtype bfloat16 --concurrency 32 \\
        --server-args "--attention-backend triton --cuda-graph-bs-decode 1 8 32"

Two servers side by side differ by more than the tap costs, on a machine shared with others. Here
the same process steps with its tap and without it within the same seconds
(`benchmarks.online.blinking_tap`), and windows are compared in pairs, neighbour with neighbour.
Feedback of all requests is sent, without a budget, to a process that decodes and discards it.

*Throughput* is requests times steps over the time of a window; what a step commits does not depend
on the tap. *Step* is the median time between two decode steps at full concurrency. Both are given
as open over shut, with a 95 % bootstrap interval over the pairs. Prefills are always tapped: their
rows are few beside those of verified blocks.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import AdaSpecConfig, ChannelConfig, TapConfig, write_config
from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling
from adaspec.load.launch import ServerSpec, free_port, start_server, wait_for_file
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.load.stats import BOOTSTRAP_DRAWS
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.versions import lineage_of
from benchmarks.online.blinking_tap import STEPS_VARIABLE, WINDOW_VARIABLE, is_open
from benchmarks.online.feedback_totals import feedback_totals
from benchmarks.online.stand_ins import discarding_consumer

_UNBOUNDED = 1e12  # bytes per second
_SETTLE = 0.25  # share of a window that is left out: work of the window before is still under way

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """Open over shut: median over the pairs of windows, and its 95 % interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class TapCost:
    """The figures of a run.

    Attributes:
        pairs: of windows, one open and one shut.
        shut_step_s: median time of a step with the tap shut.
    """

    pairs: int
    throughput: Ratio
    step: Ratio
    shut_step_s: float


def tap_cost(times: Floats, requests: Floats, window_s: float, concurrency: int) -> TapCost:
    """Compare windows pair by pair.

    Args:
        times: ``[steps]``, seconds at which decode steps were verified.
        requests: ``[steps]``, requests of each.
        concurrency: the requests of a full step.

    Raises:
        AdaSpecError: if there is no pair of windows under full load.
    """
    windows = np.floor(times / window_s).astype(np.int64)
    settled = times / window_s - windows >= _SETTLE
    full = requests == concurrency
    rates: dict[int, float] = {}
    steps: dict[int, float] = {}
    for window in np.unique(windows):
        inside = settled & (windows == window)
        at, served, whole = times[inside], requests[inside], full[inside]
        if len(at) < 3 or not whole.any() or at[-1] - at[0] < 0.5 * (1 - _SETTLE) * window_s:
            continue
        between = whole[1:] & whole[:-1]
        if not between.any():
            continue
        rates[int(window)] = float(served[1:].sum() / (at[-1] - at[0]))
        steps[int(window)] = float(np.median(np.diff(at)[between]))
    pairs = [
        (window, window + 1) if is_open(window) else (window + 1, window)
        for window in rates
        if window % 2 == 0 and window + 1 in rates
    ]
    if not pairs:
        raise AdaSpecError(
            f"no two neighbouring windows of {window_s} s were under full load ({concurrency} "
            "requests); send more requests."
        )
    return TapCost(
        pairs=len(pairs),
        throughput=_ratio([rates[a] / rates[b] for a, b in pairs]),
        step=_ratio([steps[a] / steps[b] for a, b in pairs]),
        shut_step_s=float(np.median([steps[shut] for _, shut in pairs])),
    )


def _ratio(values: Sequence[float]) -> Ratio:
    array = np.array(values)
    picks = np.random.default_rng(0).integers(len(array), size=(BOOTSTRAP_DRAWS, len(array)))
    low, high = np.percentile(np.median(array[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(array)), float(low), float(high))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--drafter", type=Path, default=BUNDLED_DRAFTER)
    parser.add_argument("--prompts", type=Path, help="JSONL; default: bundled")
    parser.add_argument("--logs", type=Path, help="keep the server's log here")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--server-args", default="", help="more of SGLang's options")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer, always all")
    parser.add_argument("--stream-interval", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=0.5)
    parser.add_argument("--teacher", choices=("hidden", "top-k"), default="hidden")
    parser.add_argument("--wait-for", type=Path, help="start the load when it exists")
    parser.add_argument("--start-timeout-s", type=float, default=420.0)
    return parser.parse_args()


def main() -> None:
    """Run everything, write the result, print the figures last."""
    options = parse()
    prompts = load_prompts(options.prompts)
    target = str(ensure_smollm2(progress=print))
    options.out.touch()
    with tempfile.TemporaryDirectory(prefix="adaspec-tap-") as scratch:
        home = Path(scratch)
        logs = options.logs or home
        logs.mkdir(parents=True, exist_ok=True)
        config = AdaSpecConfig(
            tap=TapConfig(enabled=True, teacher=options.teacher, bytes_per_second=_UNBOUNDED),
            channel=ChannelConfig(directory=str(home / "channel")),
        )
        write_config(config, home / "adaspec.toml")
        spec = ServerSpec(
            target=target,
            port=free_port(),
            drafter=str(options.drafter),
            dtype=options.dtype,
            config=home / "adaspec.toml",
            extra=(
                *("--enable-metrics", "--stream-interval", str(options.stream_interval)),
                *options.server_args.split(),
            ),
            environment={
                STEPS_VARIABLE: str(home / "steps"),
                WINDOW_VARIABLE: str(options.window_s),
            },
        )
        command = spec.command()
        command[2] = "benchmarks.online.blinking_tap"
        plan = LoadPlan(
            concurrency=options.concurrency,
            requests=options.requests,
            warmup=options.concurrency,
            sampling=Sampling(max_tokens=options.max_tokens, ignore_eos=True),
        )
        with (
            discarding_consumer(home / "channel", lineage_of(options.drafter)),
            start_server(spec, log=logs / "tap.log", command=command) as server,
        ):
            server.wait_until_healthy(options.start_timeout_s)
            wait_for_file(options.wait_for)
            (run,) = run_plans(spec.url, prompts, [plan], flush_cache=True)
            totals = feedback_totals(spec.url)
        noted = np.fromfile(home / "steps")
    cost = tap_cost(noted[0::2], noted[1::2], options.window_s, options.concurrency)
    errors = sum(outcome.error is not None for outcome in run.outcomes)
    bytes_per_s = 2 * totals["bytes"] / run.wall_s  # the tap is open half of the time
    document = {
        "machine": machine_facts(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "cost": asdict(cost),
        "feedback": totals,
        "feedback_bytes_per_s_open": bytes_per_s,
        "output_tokens_per_s": sum(o.completion_tokens for o in run.outcomes) / run.wall_s,
        "client_cpu_share": run.client_cpu_s / run.wall_s,
        "errors": errors,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{cost.pairs} pairs of windows of {options.window_s} s, {errors} errors")
    for name, ratio in (("throughput", cost.throughput), ("step", cost.step)):
        print(f"{name:<10} x {ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] with the tap")
    print(f"step without the tap {1e3 * cost.shut_step_s:.2f} ms")
    print(f"feedback {bytes_per_s / 1e6:.1f} MB/s while the tap is open; {dict(totals)}")


if __name__ == "__main__":
    main()
