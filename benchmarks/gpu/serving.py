"""Serve one drafter in several ways on one GPU and compare them in one run.

    python -m benchmarks.gpu.serving --drafter DIR --prompts FILE.jsonl --out result.json

All servers are started at once (start-up is mostly compiling on the CPU) and stay up; only one is
under load at a time. Every (server, concurrency) pair is run once per repeat, repeats outermost,
and the figures are medians. Greedy answers are compared with plain decoding token by token; where
bfloat16 rounding parts them, the gap of the target's log-probabilities is listed.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from adaspec.load.client import Sampling
from adaspec.load.contenders import Contender, parse_contender
from adaspec.load.equality import Parting, chat_token_ids, find_partings, greedy_answers
from adaspec.load.launch import ServerProcess, ServerSpec, free_port, start_server, wait_for_file
from adaspec.load.machine import machine_facts
from adaspec.load.metrics_page import keep_metrics
from adaspec.load.prompts import load_prompts
from adaspec.load.report import RunSummary, summarize
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.load.stats import median
from adaspec.target.smollm2 import ensure_smollm2
from benchmarks.gpu.step_profile import capture, read
from benchmarks.gpu.step_profile import table as profile_table

MAX_RUNNING_REQUESTS = 128


def server_spec(contender: Contender, target: Path, options: argparse.Namespace) -> ServerSpec:
    """The stock command line of a contender; everything but the algorithm is the same for all."""
    sizes = [str(size) for size in options.graph_sizes]
    return contender.server(
        target=str(target),
        drafter=str(options.drafter),
        port=free_port(),
        directory=options.logs,
        dtype=options.dtype,
        extra=(
            "--max-running-requests", str(MAX_RUNNING_REQUESTS),
            "--max-total-tokens", str(options.max_total_tokens),
            *options.server_args.split(),
            *(("--cuda-graph-bs-decode", *sizes) if sizes else ()),
        ),
    )  # fmt: skip


@contextlib.contextmanager
def running(specs: dict[str, ServerSpec], logs: Path, timeout_s: float) -> Iterator[dict[str, str]]:
    """All servers up: name → URL."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for name, spec in specs.items():
            servers[name] = stack.enter_context(start_server(spec, log=logs / f"{name}.log"))
        started = time.monotonic()
        for name, server in servers.items():
            server.wait_until_healthy(timeout_s - (time.monotonic() - started))
            print(f"{name} is up after {time.monotonic() - started:.0f} s", flush=True)
        yield {name: spec.url for name, spec in specs.items()}


def measure(
    urls: dict[str, str], prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, list[RunSummary]]:
    """Every server at every concurrency, interleaved."""
    results: dict[str, list[RunSummary]] = {name: [] for name in urls}
    sampling = Sampling(max_tokens=options.max_tokens, temperature=0.0)
    for repeat, concurrency, name in itertools.product(
        range(options.repeats), options.concurrency, urls
    ):
        plan = LoadPlan(
            concurrency=concurrency,
            requests=max(options.min_requests, options.waves * concurrency),
            warmup=concurrency,
            sampling=sampling,
        )
        (run,) = run_plans(urls[name], prompts, [plan], flush_cache=True)
        summary = summarize(run)
        results[name].append(summary)
        print(
            f"repeat {repeat} c={concurrency} {name}: {summary.output_tokens_per_s:.0f} tok/s, "
            f"{summary.committed_per_pass or 1:.2f} committed/pass, {summary.errors} errors",
            flush=True,
        )
    return results


def compare(
    urls: dict[str, str], prompts: Sequence[str], target: Path, options: argparse.Namespace
) -> dict[str, list[Parting]]:
    """Partings of every speculative server from plain decoding, at the first concurrencies."""
    tokenised = chat_token_ids(target, prompts[: options.equality_prompts])
    kwargs = {"max_tokens": options.equality_tokens}
    reference = greedy_answers(urls["plain"], tokenised, concurrency=8, top_logprobs=5, **kwargs)
    partings = {}
    for name, concurrency in itertools.product(urls, (1, 8, 32)):
        got = greedy_answers(urls[name], tokenised, concurrency=concurrency, **kwargs)
        found = partings[f"{name} at concurrency {concurrency}"] = find_partings(reference, got)
        gaps = [f"{p.gap:.3f}" if p.gap is not None else "unknown" for p in found]
        print(f"{name} c={concurrency}: {len(found)} of {len(tokenised)} part; gaps {gaps}")
    return partings


def profile(urls: dict[str, str], prompts: Sequence[str], options: argparse.Namespace) -> None:
    """Traces of every server's steps at every concurrency."""
    options.profile.mkdir(parents=True, exist_ok=True)
    found = {}
    for level, (name, url) in itertools.product(options.concurrency, urls.items()):
        label = f"{name}-c{level}"
        trace = capture(
            url,
            prompts,
            name=label,
            directory=options.profile,
            concurrency=level,
            steps=options.profile_steps,
            with_stack=options.profile_stacks,
        )
        found[label] = read(trace)
    print(profile_table(found), flush=True)


def table(results: dict[str, list[RunSummary]], levels: Sequence[int]) -> str:
    """Medians: tokens/s, ratio to plain, time to first token and per token, committed per pass."""
    lines = ["c     server        tok/s   x plain  TTFT p50  TPOT p50  TPOT p99  committed/pass"]
    for level in levels:
        plain = _median(results["plain"], level, "output_tokens_per_s")
        for name, summaries in results.items():
            speed = _median(summaries, level, "output_tokens_per_s")
            times = [
                1e3 * _median(summaries, level, key)
                for key in ("ttft_p50_s", "tpot_p50_s", "tpot_p99_s")
            ]
            committed = _median(summaries, level, "committed_per_pass")
            lines.append(
                f"{level:<5} {name:<12} {speed:>7.0f}  {speed / plain:>7.2f}  "
                + "  ".join(f"{value:>6.1f}ms" for value in times)
                + f"  {committed or 1:>8.2f}"
            )
    return "\n".join(lines)


def _median(summaries: Sequence[RunSummary], level: int, key: str) -> float:
    values = [getattr(s, key) for s in summaries if s.concurrency == level]
    return median([value for value in values if value is not None]) or 0.0


def main() -> None:
    """Parse the options, run everything, print the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/adaspec-serving"))
    parser.add_argument("--wait-for", type=Path, help="start the load when it exists")
    parser.add_argument("--servers", nargs="+", default=["plain", "dflash", "adaspec", "adaspec-8"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--graph-sizes", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument(
        "--server-args", default="--attention-backend triton --stream-interval 8 --sleep-on-idle"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-total-tokens", type=int, default=200_000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--min-requests", type=int, default=16)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--equality-prompts", type=int, default=64)
    parser.add_argument("--equality-tokens", type=int, default=128)
    parser.add_argument("--start-timeout-s", type=float, default=420.0)
    parser.add_argument("--profile", type=Path, help="write traces of steps to this directory")
    parser.add_argument("--profile-steps", type=int, default=40)
    parser.add_argument(
        "--profile-stacks", action="store_true", help="with Python's calls, which slows the steps"
    )
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    target = options.target or ensure_smollm2(progress=print)
    prompts = load_prompts(options.prompts)
    contenders = [parse_contender(name) for name in options.servers]
    specs = {c.name: server_spec(c, target, options) for c in contenders}
    with running(specs, options.logs, options.start_timeout_s) as urls:
        wait_for_file(options.wait_for)
        partings = compare(urls, prompts, target, options)
        results = measure(urls, prompts, options)
        if options.profile is not None:
            profile(urls, prompts, options)
        for name, url in urls.items():
            keep_metrics(url, options.logs / f"{name}.metrics")
    for name, summaries in results.items():
        if (share := max(s.client_cpu_share for s in summaries)) > 0.8:
            print(f"warning: the load client used {share:.0%} of a core against {name}; at that")
            print("level the figures are the client's, not the server's. Raise --stream-interval.")
    facts = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine_facts(),
        "gpu": _gpu_name(),
        "runs": {name: [asdict(s) for s in found] for name, found in results.items()},
        "partings": {name: [asdict(p) for p in found] for name, found in partings.items()},
    }
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(results, options.concurrency))


def _gpu_name() -> str | None:
    with contextlib.suppress(FileNotFoundError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return None


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    main()
