"""Does the drafter get better on traffic it has not seen? A shift of domain on live servers.

    python benchmarks/online/shift.py --drafter DIR --before gsm8k.jsonl:64 --after french.jsonl \
        --seeds 0 1 2 --out result.json

For every seed, `adaspec serve --online` is started with an empty version store and serves the
prompts before the shift, then those after it, in an order of the seed's own. A server without a
learner serves every prompt once: what it commits for a greedy request does not depend on the order.
The figure is committed tokens per target pass on the *later* requests (the last third after the
shift): online against static, the same requests on both, with a bootstrap interval over requests,
seed by seed and pooled. Throughput is that of the last third of each run, where the learner works
beside the online server.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adaspec.load.client import RequestOutcome, Sampling
from adaspec.load.launch import ServerProcess, ServerSpec, free_port, start_server, wait_for_file
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, LoadRun, run_plans
from adaspec.target.smollm2 import ensure_smollm2

_PARTS = 6  # of the traffic after the shift, for the course over time
_LATER_PARTS = 2
_DRAWS = 10_000

STATIC = "static"


Counts = tuple[int, int]  # committed tokens and target passes of a request


@dataclass(frozen=True)
class Served:
    """What a server did with the traffic: counts by prompt, in the order of the requests."""

    before: dict[str, Counts]
    after: dict[str, Counts]
    later_tokens_per_s: float
    errors: int

    @property
    def later(self) -> list[str]:
        """The prompts of the last third after the shift."""
        return list(self.after)[-later_count(len(self.after)) :]


@dataclass(frozen=True)
class Gain:
    """Relative gain in committed tokens per target pass, with its 95 % interval."""

    estimate: float
    low: float
    high: float


def serve_command(spec: ServerSpec, learn_config: Path | None) -> list[str]:
    """`adaspec serve`, with a learner or without, for a server of this description."""
    command = [sys.executable, "-m", "adaspec.cli.main", "serve", "--target", spec.target]
    command += ["--drafter", str(spec.drafter), "--port", str(spec.port), "--log", "-"]
    if spec.dtype is not None:
        command += ["--dtype", spec.dtype]
    if spec.config is not None:
        command += ["--config", str(spec.config)]
    if learn_config is not None:
        command += ["--online", "--learn-config", str(learn_config)]
    return [*command, "--", *spec.extra]


def start(name: str, target: Path, options: argparse.Namespace) -> ServerProcess:
    """Start the static server or that of a seed; a cache of its own is an empty version store."""
    cache = options.logs / f"cache-{name}"
    cache.mkdir(parents=True)
    spec = ServerSpec(
        target=str(target),
        drafter=str(options.drafter),
        port=free_port(),
        dtype=options.dtype,
        config=options.config,
        extra=tuple(options.server_args.split()),
        environment={"ADASPEC_CACHE": str(cache)},
    )
    learn = None if name == STATIC else options.learn_config
    return start_server(spec, log=options.logs / f"{name}.log", command=serve_command(spec, learn))


@contextlib.contextmanager
def running(names: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """These servers, all up: name → URL."""
    target = ensure_smollm2(progress=print)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(start(name, target, options)) for name in names}
        for name, server in servers.items():
            server.wait_until_healthy(options.start_timeout_s)
            print(f"{name} is up", flush=True)
        yield {name: server.url for name, server in servers.items()}


def serve_traffic(
    url: str, before: Sequence[str], after: Sequence[str], options: argparse.Namespace
) -> Served:
    """Serve both phases; what comes later is timed by itself."""
    later = later_count(len(after))
    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature)

    def run(prompts: Sequence[str]) -> LoadRun:
        plan = LoadPlan(
            concurrency=options.concurrency, requests=len(prompts), warmup=0, sampling=sampling
        )
        return run_plans(url, prompts, [plan])[0]

    runs = [run(before), run(after[:-later]), run(after[-later:])]
    outcomes = [run.outcomes for run in runs]
    tokens = sum(o.completion_tokens for o in outcomes[2])
    return Served(
        before=_counts(before, outcomes[0]),
        after=_counts(after, outcomes[1] + outcomes[2]),
        later_tokens_per_s=tokens / runs[2].wall_s,
        errors=sum(o.error is not None for part in outcomes for o in part),
    )


def _counts(prompts: Sequence[str], outcomes: Sequence[RequestOutcome]) -> dict[str, Counts]:
    """The first token comes from the prefill and belongs to no pass."""
    return {
        prompt: (max(0, o.completion_tokens - 1), o.target_passes or 0)
        for prompt, o in zip(prompts, outcomes, strict=True)
    }


def later_count(requests: int) -> int:
    """How many of the requests after the shift are the later ones."""
    return requests * _LATER_PARTS // _PARTS


def gain(online: Sequence[Counts], static: Sequence[Counts], level: float = 0.95) -> Gain:
    """Ratio of committed tokens per pass, minus one; requests are resampled as pairs."""
    sums = np.array([online, static], dtype=np.float64)  # [2, requests, (tokens, passes)]
    picks = np.random.default_rng(0).integers(sums.shape[1], size=(_DRAWS, sums.shape[1]))
    drawn = sums[:, picks].sum(2)  # [2, draws, (tokens, passes)]
    rates = drawn[..., 0] / drawn[..., 1]
    tail = (1 - level) / 2
    low, high = np.quantile(rates[0] / rates[1] - 1, [tail, 1 - tail])
    whole = sums.sum(1)
    estimate = (whole[0, 0] / whole[0, 1]) / (whole[1, 0] / whole[1, 1]) - 1
    return Gain(float(estimate), float(low), float(high))


def compare(online: dict[int, Served], static: Served) -> dict[str, Any]:
    """Gains on the later requests, seed by seed and pooled."""
    pooled: list[tuple[Counts, Counts]] = []
    seeds = {}
    for seed, served in online.items():
        pairs = [(counts, static.after[prompt]) for prompt, counts in served.after.items()]
        later = pairs[-later_count(len(pairs)) :]
        before = [(counts, static.before[prompt]) for prompt, counts in served.before.items()]
        pooled += later
        edges = np.linspace(0, len(pairs), _PARTS + 1).astype(int)
        seeds[seed] = {
            "later": asdict(gain(*zip(*later, strict=True))),
            "course": [
                gain(*zip(*pairs[a:b], strict=True)).estimate for a, b in itertools.pairwise(edges)
            ],
            "before": asdict(gain(*zip(*before, strict=True))),
            "static": _rate([theirs for _, theirs in later]),
            "online": _rate([ours for ours, _ in later]),
            "throughput": served.later_tokens_per_s / static.later_tokens_per_s - 1,
            "errors": served.errors,
        }
    return {
        "seeds": seeds,
        "static_errors": static.errors,
        "later": asdict(gain(*zip(*pooled, strict=True))),
    }


def _rate(counts: Sequence[Counts]) -> float:
    return sum(t for t, _ in counts) / sum(p for _, p in counts)


def table(summary: dict[str, Any]) -> str:
    """One line per seed, the pooled gain last."""
    lines = ["seed  static  online  later requests            throughput  course after the shift"]
    for seed, row in summary["seeds"].items():
        later = row["later"]
        lines.append(
            f"{seed:<4}  {row['static']:>6.2f}  {row['online']:>6.2f}  "
            f"{later['estimate']:>+7.1%} [{later['low']:+.1%}, {later['high']:+.1%}]  "
            f"{row['throughput']:>+9.1%}  " + " ".join(f"{g:+.0%}" for g in row["course"])
        )
    later = summary["later"]
    lines.append(
        f"all                    {later['estimate']:>+7.1%} "
        f"[{later['low']:+.1%}, {later['high']:+.1%}]"
    )
    return "\n".join(lines)


def _decisions(cache: Path) -> list[Any]:
    """The learner's decision log."""
    (path,) = cache.glob("online/*/store/decisions.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def online_name(seed: int) -> str:
    """Name of a seed's server."""
    return f"online-{seed}"


def _prompts(argument: str) -> tuple[str, ...]:
    path, _, count = argument.partition(":")
    prompts = load_prompts(Path(path))
    return prompts[: int(count)] if count else prompts


def main() -> None:
    """Parse the options, serve everything, print the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--before", required=True, metavar="PROMPTS[:COUNT]")
    parser.add_argument("--after", required=True, metavar="PROMPTS[:COUNT]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/adaspec-shift"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--together", action="store_true", help="all servers up at once")
    parser.add_argument("--wait-for", type=Path, default=None, help="start the load when it exists")
    parser.add_argument("--config", type=Path, default=None, help="the servers' configuration")
    parser.add_argument("--learn-config", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--server-args", default="")
    parser.add_argument("--start-timeout-s", type=float, default=420.0)
    options = parser.parse_args()
    before, after = _prompts(options.before), _prompts(options.after)
    names = [online_name(seed) for seed in options.seeds]
    groups = [[STATIC, *names]] if options.together else [[STATIC], *([name] for name in names)]
    served: dict[str, Served] = {}
    for group in groups:
        with running(group, options) as urls:
            wait_for_file(options.wait_for)
            for name, url in urls.items():
                order = random.Random(name)
                first, second = (order.sample(part, len(part)) for part in (before, after))
                served[name] = serve_traffic(url, first, second, options)
                print(f"{name} has served its traffic", flush=True)
                if name != STATIC:  # written each time: a long run may be cut short
                    print(write_result(served, options), flush=True)


def write_result(served: dict[str, Served], options: argparse.Namespace) -> str:
    """Write what is known so far, and return its table."""
    done = {seed: online_name(seed) for seed in options.seeds if online_name(seed) in served}
    summary = compare({seed: served[name] for seed, name in done.items()}, served[STATIC])
    facts = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine_facts(),
        "learn_config": options.learn_config.read_text(),
        "config": options.config.read_text() if options.config else "",
        **summary,
        "requests": msgspec.to_builtins(served),
        "decisions": {name: _decisions(options.logs / f"cache-{name}") for name in done.values()},
    }
    options.out.write_text(json.dumps(facts) + "\n")
    return table(summary)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    main()
