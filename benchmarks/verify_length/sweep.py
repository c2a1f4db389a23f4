"""Policies of the verify length under every load, in one run.

    python -m benchmarks.verify_length.sweep --out sweep.json --plot sweep.png

Contenders: ``plain`` (a server without speculation), ``fixed-N``, ``ema``, ``adaflash`` and
``goodput``. Loads: closed loops at each concurrency; a ramp up and down through all of them; and
easy and hard requests together. All servers stay up, one is under load at a time; repeats are
outermost and the order of the contenders rotates.

Answers are cut at lengths that differ (``--spread``): if all were equally long, requests of plain
decoding, which all run at one speed, would begin and end together for ever, and their prompts be
read together.

First, greedy answers of every contender are compared token by token with those of ``plain``. In
float32 they must be identical; in bfloat16 partings are listed with the gap of the target's
log-probabilities (`adaspec.load.equality`).

With ``--one-server`` all policies share one ADASPEC server, which is told before each run what to
follow (`benchmarks.verify_length.switching_server`); policies that learn keep what they know while
others have their turn. Otherwise every contender has a server of its own, as is needed where graphs
are captured for one verify length.
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import AdaSpecConfig, VerifyConfig, write_config
from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling
from adaspec.load.equality import Parting, chat_token_ids, find_partings, greedy_answers
from adaspec.load.launch import ServerSpec, free_port, start_server, wait_for_file
from adaspec.load.machine import machine_facts
from adaspec.load.metrics_page import keep_metrics
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, LoadRun, run_plans
from adaspec.target.smollm2 import ensure_smollm2
from benchmarks.verify_length.report import Measured, draw, measured, table, verdicts
from benchmarks.verify_length.switching_server import POLICY_FILE_VARIABLE, select

DEFAULT_CONTENDERS = ("plain", "fixed-2", "fixed-4", "fixed-8", "fixed-16", "ema", "goodput")
_GRADED_SHARE = 4  # the best and the worst quarter of the prompts are the easy and the hard ones


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Everything a repetition of the run needs, apart from the machine.

    Attributes:
        waves: requests of a run are ``waves * concurrency``, but at least ``min_requests``.
        settle: rounds of all loads before the measured ones, in which policies learn.
    """

    target: str
    drafter: str
    prompts: str
    contenders: tuple[str, ...]
    concurrency: tuple[int, ...]
    mixed_concurrency: tuple[int, ...]
    repeats: int
    settle: int
    waves: int
    min_requests: int
    sampling: Sampling
    dtype: str | None
    server_args: tuple[str, ...]
    one_server: bool
    levels: bool
    ramp: bool
    start_timeout_s: float

    def plan(self, concurrency: int, warmup: int) -> LoadPlan:
        """A closed loop at this concurrency."""
        return LoadPlan(
            concurrency=concurrency,
            requests=max(self.min_requests, self.waves * concurrency),
            warmup=warmup,
            sampling=self.sampling,
        )


@dataclass(frozen=True)
class Load:
    """One kind of load: closed loops, one after the other."""

    name: str
    plans: tuple[LoadPlan, ...]
    prompts: tuple[str, ...]


def verify_config(name: str) -> VerifyConfig | None:
    """The policy of a contender; None is plain decoding.

    Raises:
        AdaSpecError: if there is none of that name.
    """
    kind, _, length = name.partition("-")
    if name == "plain":
        return None
    if name in ("ema", "adaflash", "goodput"):
        return VerifyConfig(policy=name)  # type: ignore[arg-type]
    if kind == "fixed" and length.isdecimal() and int(length) > 0:
        return VerifyConfig(policy="fixed", length=int(length))
    raise AdaSpecError(f"{name!r} names no policy; use plain, fixed-N, ema, adaflash or goodput.")


class Fleet:
    """Running servers, and which of them follows which policy."""

    def __init__(self, urls: dict[str, str], policy_file: Path | None) -> None:
        self._urls = urls
        self._policy_file = policy_file

    def url(self, contender: str) -> str:
        """Base URL of the server that now serves as this contender does."""
        config = verify_config(contender)
        if config is not None and self._policy_file is not None:
            select(self._policy_file, config)
        return self._urls[contender]


@contextlib.contextmanager
def running(sweep: Sweep, directory: Path, console: Console) -> Iterator[Fleet]:
    """All servers, up until the block ends; their logs and configurations go to ``directory``."""
    policy_file = directory / "policy.json" if sweep.one_server else None
    specs: dict[str, ServerSpec] = {}
    for name in sweep.contenders:
        config = verify_config(name)
        if config is None or policy_file is None:
            specs[name] = _spec(sweep, name, config, directory)
        else:
            select(policy_file, config)
            shared = next((specs[n] for n in specs if n != "plain"), None)
            specs[name] = shared or replace(
                _spec(sweep, "switching", VerifyConfig(policy="goodput"), directory),
                environment={POLICY_FILE_VARIABLE: str(policy_file)},
            )
    distinct = {spec.port: (name, spec) for name, spec in specs.items()}
    at_once = torch.cuda.is_available()  # two that start on a CPU take each other's memory for used
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, spec in distinct.values():
            command = spec.command()
            if spec.environment is not None:
                command[2] = "benchmarks.verify_length.switching_server"
            log = directory / f"{name}.log"
            servers[name] = stack.enter_context(start_server(spec, log=log, command=command))
            if not at_once:
                servers[name].wait_until_healthy(sweep.start_timeout_s)
        for server in servers.values():
            server.wait_until_healthy(sweep.start_timeout_s)
        console.print(f"{len(servers)} servers are up")
        yield Fleet({name: spec.url for name, spec in specs.items()}, policy_file)


def _spec(sweep: Sweep, name: str, config: VerifyConfig | None, directory: Path) -> ServerSpec:
    file = None
    if config is not None:
        file = directory / f"{name}.toml"
        write_config(AdaSpecConfig(verify=config), file)
    return ServerSpec(
        target=sweep.target,
        port=free_port(),
        drafter=None if config is None else sweep.drafter,
        dtype=sweep.dtype,
        config=file,
        extra=sweep.server_args,
    )


def run_load(url: str, load: Load) -> list[LoadRun]:
    """The closed loops of a load, in their order."""
    return run_plans(url, load.prompts, load.plans, flush_cache=True)


def grade(sweep: Sweep, url: str, prompts: Sequence[str]) -> tuple[str, ...]:
    """Easy and hard prompts in turn, by the tokens that a target pass commits in their answers."""
    plan = replace(sweep.plan(max(sweep.mixed_concurrency), 0), requests=len(prompts))
    (run,) = run_plans(url, prompts, [plan], flush_cache=True)
    grades = {
        prompt: outcome.completion_tokens / outcome.target_passes
        for prompt, outcome in zip(prompts, run.outcomes, strict=True)
        if outcome.target_passes
    }
    ordered = sorted(grades, key=grades.__getitem__)
    count = max(1, len(ordered) // _GRADED_SHARE)
    pairs = zip(ordered[-count:], ordered[:count], strict=True)
    return tuple(prompt for pair in pairs for prompt in pair)


def loads_of(sweep: Sweep, prompts: tuple[str, ...], mixed: tuple[str, ...]) -> list[Load]:
    """All loads of a round."""
    counts = sweep.concurrency
    levels = counts if sweep.levels else ()
    ramp = (*counts, *counts[-2::-1])
    return [
        *(Load(f"c={level}", (sweep.plan(level, level),), prompts) for level in levels),
        *([Load("ramp", tuple(sweep.plan(n, 0) for n in ramp), prompts)] if sweep.ramp else []),
        *(
            Load(f"mixed c={level}", (sweep.plan(level, level),), mixed)
            for level in sweep.mixed_concurrency
        ),
    ]


def measure(
    sweep: Sweep,
    fleet: Fleet,
    directory: Path,
    console: Console,
    save: Callable[[list[Measured]], None],
) -> list[Measured]:
    """Every load with every contender, repeats outermost, in an order that rotates.

    What there is is saved after every measured load: a long run may be cut short. What AdaSpec's
    servers with ``--enable-metrics`` tell then goes to ``directory``.
    """
    prompts = load_prompts(Path(sweep.prompts) if sweep.prompts != "bundled" else None)
    speculative = next(name for name in sweep.contenders if name != "plain")
    loads = loads_of(sweep, prompts, grade(sweep, fleet.url(speculative), prompts))
    results: list[Measured] = []
    for repeat in range(-sweep.settle, sweep.repeats):
        shift = repeat % len(sweep.contenders)
        order = sweep.contenders[shift:] + sweep.contenders[:shift]
        for load, contender in itertools.product(loads, order):
            url = fleet.url(contender)
            found = measured(contender, load.name, repeat, run_load(url, load))
            keep_metrics(url, directory / f"{repeat}-{load.name}-{contender}.metrics")
            console.print(
                f"round {repeat + 1} of {sweep.repeats}  {load.name:<12} {contender:<9}"
                f" {found.tokens_per_s:7.1f} tok/s  {found.errors} errors"
                f" {' '.join(found.messages)}"
            )
            if repeat >= 0:
                results.append(found)
                save(results)
    return results


def compare(
    sweep: Sweep, fleet: Fleet, prompts: int, tokens: int, console: Console
) -> dict[str, list[Parting]]:
    """Where greedy answers of each contender part from plain decoding's, at each concurrency."""
    if "plain" not in sweep.contenders or prompts == 0:
        return {}
    texts = load_prompts(Path(sweep.prompts) if sweep.prompts != "bundled" else None)[:prompts]
    tokenised = chat_token_ids(sweep.target, texts)
    reference = greedy_answers(
        fleet.url("plain"), tokenised, max_tokens=tokens, concurrency=8, top_logprobs=5
    )
    partings: dict[str, list[Parting]] = {}
    for name, level in itertools.product(sweep.contenders, sweep.concurrency):
        got = greedy_answers(fleet.url(name), tokenised, max_tokens=tokens, concurrency=level)
        found = partings[f"{name} c={level}"] = find_partings(reference, got)
        gaps = sorted({f"{p.gap:.3f}" if p.gap is not None else "unknown" for p in found})
        console.print(f"{name} c={level}: {len(found)} of {len(got)} part {' '.join(gaps)}")
    return partings


def main(
    out: Annotated[Path, typer.Option(help="JSON result.")],
    plot: Annotated[Path | None, typer.Option(help="Picture; needs matplotlib.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL; default: bundled.")] = None,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[Path, typer.Option(help="Drafter of the target.")] = BUNDLED_DRAFTER,
    policy: Annotated[list[str] | None, typer.Option(help="Contender; repeatable.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option("--concurrency", "-c", min=1)] = None,
    levels: Annotated[bool, typer.Option(help="A closed loop at each concurrency.")] = True,
    ramp: Annotated[bool, typer.Option(help="Also up and down through all.")] = True,
    mixed: Annotated[list[int] | None, typer.Option(help="Of easy and hard together.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    settle: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 1,
    waves: Annotated[int, typer.Option(min=1, help="Requests per unit of concurrency.")] = 3,
    min_requests: Annotated[int, typer.Option(min=1, help="Fewest requests of a run.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    spread: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of --max-tokens.")] = 0.5,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="SGLang's --dtype.")] = None,
    server_args: Annotated[str, typer.Option(help="More of SGLang's options, for all.")] = "",
    one_server: Annotated[bool, typer.Option(help="One ADASPEC server for all policies.")] = False,
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    equality_prompts: Annotated[int, typer.Option(min=0)] = 16,
    wait_for: Annotated[Path | None, typer.Option(help="Start the load when it exists.")] = None,
    start_timeout_s: Annotated[float, typer.Option(min=1.0)] = 600.0,
) -> None:
    """Compare policies of the verify length; prints tables and writes every run to a JSON file."""
    console = Console(highlight=False)
    counts = tuple(sorted(concurrency or (1, 2, 4, 8, 16, 32)))
    sweep = Sweep(
        target=target or str(ensure_smollm2(progress=console.print)),
        drafter=str(drafter),
        prompts=str(prompts) if prompts else "bundled",
        contenders=tuple(dict.fromkeys(policy or DEFAULT_CONTENDERS)),
        concurrency=counts,
        mixed_concurrency=tuple(mixed or (counts[len(counts) // 2],)),
        repeats=repeats,
        settle=settle,
        waves=waves,
        min_requests=min_requests,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, spread=spread),
        levels=levels,
        ramp=ramp,
        dtype=dtype,
        server_args=tuple(server_args.split()),
        one_server=one_server,
        start_timeout_s=start_timeout_s,
    )
    if all(verify_config(name) is None for name in sweep.contenders):
        raise AdaSpecError("there is no policy to compare; name one with --policy.")
    out.touch()
    with tempfile.TemporaryDirectory(prefix="adaspec-sweep-") as scratch:
        directory = logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        with running(sweep, directory, console) as fleet:
            wait_for_file(wait_for)
            partings = compare(sweep, fleet, equality_prompts, max_tokens, console)

            def save(results: list[Measured]) -> None:
                document = {
                    "machine": machine_facts(),
                    "sweep": asdict(sweep),
                    "verdicts": [asdict(verdict) for verdict in verdicts(results)],
                    "partings": {n: [asdict(p) for p in found] for n, found in partings.items()},
                    "runs": [asdict(result) for result in results],
                }
                out.write_text(json.dumps(document, indent=1) + "\n")

            results = measure(sweep, fleet, directory, console, save)
    console.print(table(results))
    if plot is not None:
        draw(results, plot)


if __name__ == "__main__":
    typer.run(main)
