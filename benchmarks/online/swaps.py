"""What the online loop costs: the same load without it, with the tap, and with tap and swaps.

    python -m benchmarks.online.swaps --out result.json

Three ADASPEC servers are up at the same time and only one is under load: `off` has no online loop,
`tap` sends feedback to a process that discards it, `swaps` does too and is given another version
every few seconds. Every repeat runs each of them once, in an order that rotates. On a GPU:

    python -m benchmarks.online.swaps --out result.json --dtype bfloat16 --concurrency 1 32 \\
        --requests 96 --max-tokens 256 --max-total-tokens 200000 --server-args \\
        "--attention-backend triton --max-running-requests 128 --cuda-graph-bs-decode 1 8 32"

A *gap* is the time between two pieces of one streamed answer; with a stream interval of 1 each
decode step sends one, so a gap is the inter-token latency that a reader sees. The *decode step* is
the time of an answer from its first text to its last, over its target passes. A *swap pause* is how
long a swap kept the device or the scheduler busy, as the server logs it. Greedy answers of `tap`
and `swaps` are compared with those of `off`: in float32 they must be identical, in bfloat16
partings are listed with the gap of the log-probabilities. The exit code is 1 if a request failed, a
float32 answer differs, or a run saw no swap.
"""

import argparse
import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import AdaSpecConfig, ChannelConfig, TapConfig, WatchConfig, write_config
from adaspec.load.client import Sampling
from adaspec.load.equality import Parting, chat_token_ids, find_partings, greedy_answers
from adaspec.load.launch import ServerProcess, ServerSpec, free_port, start_server
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.load.report import first_errors, summarize
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.load.stats import median, percentile
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.versions import lineage_of
from benchmarks.online.feedback_totals import feedback_totals
from benchmarks.online.stand_ins import Publication, discarding_consumer, publisher
from benchmarks.online.swaps_report import SERVERS, Run, comparisons, report

_ALWAYS = ("--stream-interval", "1", "--enable-metrics", "--sleep-on-idle")
_METRICS_S = 1.5  # the server writes its feedback counters once a second
_EQUALITY_ROUNDS = 30
_EQUALITY_SWAPS = 2


@dataclass(frozen=True)
class Contestant:
    """A server that is up."""

    name: str
    url: str
    log: Path
    publishing: Event | None = None

    @contextlib.contextmanager
    def swapping(self) -> Iterator[None]:
        """Versions arrive during the ``with`` block, if they ever do on this server."""
        if self.publishing is not None:
            self.publishing.set()
        try:
            yield
        finally:
            if self.publishing is not None:
                self.publishing.clear()

    def swaps(self) -> int:
        """Swaps so far."""
        return len(re.findall(r"drafter swapped from version", self._text()))

    def pauses_s(self) -> list[float]:
        """Seconds of each swap so far."""
        return [float(ms) / 1e3 for ms in re.findall(r"the swap took ([\d.]+) ms", self._text())]

    def feedback(self) -> Counter[str]:
        """Feedback records so far by outcome, and the ``bytes`` that were sent."""
        return feedback_totals(self.url)

    def _text(self) -> str:
        return self.log.read_text(errors="replace")


def server_config(name: str, directory: Path, bytes_per_second: float) -> AdaSpecConfig:
    """The configuration of one of the `SERVERS`; nothing is watched, so every version stays."""
    if name == "off":
        return AdaSpecConfig()
    store = str(directory / "store") if name == "swaps" else None
    return AdaSpecConfig(
        tap=TapConfig(enabled=True, bytes_per_second=bytes_per_second),
        channel=ChannelConfig(directory=str(directory / "channel"), store=store),
        watch=WatchConfig(window_tokens=0),
    )


@contextlib.contextmanager
def contestants(
    target: str, options: argparse.Namespace, directory: Path
) -> Iterator[list[Contestant]]:
    """All servers up, started at once, each with its stand-ins."""
    lineage = lineage_of(options.drafter)
    with contextlib.ExitStack() as stack:
        started: list[tuple[Contestant, ServerProcess]] = []
        for name in SERVERS:
            home = directory / name
            home.mkdir()
            write_config(server_config(name, home, options.bytes_per_second), home / "adaspec.toml")
            publishing = None
            if name != "off":
                stack.enter_context(discarding_consumer(home / "channel", lineage))
            if name == "swaps":
                publication = Publication(
                    store=home / "store",
                    channel=home / "channel",
                    drafter=options.drafter,
                    seconds=options.swap_seconds,
                    mode=options.mode,
                    noise=options.noise,
                )
                publishing = stack.enter_context(publisher(publication))
            spec = ServerSpec(
                target=target,
                port=free_port(),
                drafter=str(options.drafter),
                dtype=options.dtype,
                config=home / "adaspec.toml",
                extra=(
                    *_ALWAYS,
                    *("--max-total-tokens", str(options.max_total_tokens)),
                    *options.server_args.split(),
                ),
            )
            log = options.logs / f"{name}.log"
            server = stack.enter_context(start_server(spec, log=log))
            started.append((Contestant(name, spec.url, log, publishing), server))
        begin = time.monotonic()
        for contestant, server in started:
            server.wait_until_healthy(options.start_timeout_s - (time.monotonic() - begin))
            print(f"{contestant.name} is up after {time.monotonic() - begin:.0f} s", flush=True)
        yield [contestant for contestant, _ in started]


def measure(
    servers: Sequence[Contestant], prompts: Sequence[str], options: argparse.Namespace
) -> list[Run]:
    """Every server at every concurrency, interleaved."""
    runs = []
    for repeat, level in itertools.product(range(options.repeats), options.concurrency):
        shift = repeat % len(servers)
        for server in (*servers[shift:], *servers[:shift]):
            run = run_once(server, prompts, repeat, level, options)
            runs.append(run)
            print(
                f"repeat {repeat} c={level} {server.name:<5} "
                f"{run.summary.output_tokens_per_s:8.1f} tok/s  gap p99 {1e3 * run.gap_p99_s:.1f} "
                f"ms  {run.swaps} swaps  {run.summary.errors} errors",
                flush=True,
            )
    return runs


def run_once(
    server: Contestant,
    prompts: Sequence[str],
    repeat: int,
    level: int,
    options: argparse.Namespace,
) -> Run:
    """Warm up, then load a server once, and see what it did meanwhile."""
    sampling = Sampling(max_tokens=options.max_tokens, ignore_eos=True)
    warmup = LoadPlan(concurrency=level, requests=level, warmup=0, sampling=sampling)
    plan = LoadPlan(concurrency=level, requests=options.requests, warmup=0, sampling=sampling)
    shifted = [prompts[(repeat * plan.requests + i) % len(prompts)] for i in range(plan.requests)]
    with server.swapping():
        run_plans(server.url, prompts, [warmup])
        time.sleep(_METRICS_S)
        feedback, swaps, pauses = server.feedback(), server.swaps(), len(server.pauses_s())
        (run,) = run_plans(server.url, shifted, [plan], flush_cache=True)
    time.sleep(_METRICS_S)
    gained = server.feedback() - feedback
    for error in first_errors([run]):
        print(f"{server.name}: {error}", flush=True)
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    gaps = [gap for outcome in complete for gap in outcome.gaps_s]
    steps = [
        (outcome.finished_s - outcome.first_token_s) / outcome.target_passes
        for outcome in complete
        if outcome.first_token_s is not None and outcome.target_passes
    ]
    return Run(
        server=server.name,
        summary=replace(summarize(run), repeat=repeat),
        gap_p50_s=percentile(gaps, 50) or 0.0,
        gap_p99_s=percentile(gaps, 99) or 0.0,
        gap_max_s=max(gaps, default=0.0),
        step_s=median(steps) or 0.0,
        feedback_bytes_per_s=gained.pop("bytes", 0) / run.wall_s,
        feedback=dict(gained),
        swaps=server.swaps() - swaps,
        pauses_s=tuple(server.pauses_s()[pauses:]),
    )


def compare(
    servers: Sequence[Contestant], target: str, prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, list[Parting]]:
    """Where greedy answers part from those of `off`; on `swaps`, round after round of swaps."""
    tokenised = chat_token_ids(target, prompts[: options.equality_prompts])
    limits = {"max_tokens": options.equality_tokens, "concurrency": max(options.concurrency)}
    by_name = {server.name: server for server in servers}
    reference = greedy_answers(by_name["off"].url, tokenised, top_logprobs=5, **limits)
    partings: dict[str, list[Parting]] = {}
    for name in ("tap", "swaps"):
        server, found, rounds = by_name[name], [], 0
        wanted = server.swaps() + (0 if server.publishing is None else _EQUALITY_SWAPS)
        with server.swapping():
            while rounds == 0 or (server.swaps() < wanted and rounds < _EQUALITY_ROUNDS):
                found += find_partings(reference, greedy_answers(server.url, tokenised, **limits))
                rounds += 1
        partings[name] = found
        gaps = sorted({f"{p.gap:.3f}" if p.gap is not None else "unknown" for p in found})
        print(
            f"{name}: {len(found)} of {rounds * len(tokenised)} answers part from off's"
            + (f"; gaps {' '.join(gaps)}" if gaps else ""),
            flush=True,
        )
    return partings


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", type=Path, default=BUNDLED_DRAFTER)
    parser.add_argument("--prompts", type=Path, help="JSONL; default: bundled")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--server-args", default="", help="more of SGLang's options, for all")
    parser.add_argument("--max-total-tokens", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="of each run")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer, always all")
    parser.add_argument("--swap-seconds", type=float, default=3.0)
    parser.add_argument("--mode", choices=("frozen-kv", "full"), default="frozen-kv")
    parser.add_argument("--noise", type=float, default=0.01, help="relative, on the weights")
    parser.add_argument("--bytes-per-second", type=float, default=64e6, help="budget of the tap")
    parser.add_argument("--equality-prompts", type=int, default=16)
    parser.add_argument("--equality-tokens", type=int, default=128)
    parser.add_argument("--start-timeout-s", type=float, default=420.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, write the result, print the table last."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts)
    target = options.target or str(ensure_smollm2(progress=print))
    options.out.touch()
    with tempfile.TemporaryDirectory(prefix="adaspec-swaps-") as scratch:
        options.logs = options.logs or Path(scratch)
        options.logs.mkdir(parents=True, exist_ok=True)
        with contestants(target, options, Path(scratch)) as servers:
            partings = compare(servers, target, prompts, options)
            runs = measure(servers, prompts, options)
    document = {
        "machine": machine_facts(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "comparisons": comparisons(runs, options.concurrency),
        "partings": {name: [asdict(p) for p in found] for name, found in partings.items()},
        "runs": [asdict(run) for run in runs],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    if (share := max(run.summary.client_cpu_share for run in runs)) > 0.8:
        print(f"warning: the load client used {share:.0%} of a core; gaps are partly its own.")
    print(report(runs, options.concurrency))
    swapped = all(run.swaps > 0 for run in runs if run.server == "swaps")
    exact = options.dtype != "float32" or not any(partings.values())
    complete = not any(run.summary.errors for run in runs)
    for holds, problem in (
        (swapped, "a run saw no swap; make it longer, or swap more often"),
        (exact, "float32 answers differ"),
        (complete, "requests failed"),
    ):
        if not holds:
            print(f"failed: {problem}")
    return 0 if swapped and exact and complete else 1


if __name__ == "__main__":
    sys.exit(main())
