"""`adaspec bench`: put load on a running server and report what a client sees."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from adaspec.cli.files import check_writable, write_json
from adaspec.load.client import RequestOutcome, Sampling
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.load.report import first_errors, summarize, summary_table
from adaspec.load.runner import LoadPlan, run_plans


def bench(
    url: Annotated[str, typer.Argument(help="Base URL, for example http://127.0.0.1:30000.")],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with a "prompt"; default: a small mixed set.')
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", min=1, help="Repeat for several.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Measured requests per run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every concurrency.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before a run, not counted.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Always generate --max-tokens.")] = False,
    flush_cache: Annotated[bool, typer.Option(help="Empty the prefix cache before a run.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Measure tokens/s, time to first token and committed tokens per target pass.

    Exits with code 1 if any request failed.
    """
    levels = list(dict.fromkeys(concurrency or [1, 4, 8]))
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos)
    plans = [
        LoadPlan(concurrency=level, requests=requests, warmup=warmup, sampling=sampling)
        for level in levels
    ]
    texts = load_prompts(prompts)
    if json is not None:
        check_writable(json, "--json")
    base = url.rstrip("/")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        bars = {
            plan: progress.add_task(f"concurrency {plan.concurrency}", total=requests * repeats)
            for plan in plans
        }

        def advance(plan: LoadPlan, outcome: RequestOutcome) -> None:
            progress.advance(bars[plan])

        runs = run_plans(
            base, texts, plans, repeats=repeats, flush_cache=flush_cache, on_request=advance
        )
    summaries = [summarize(run) for run in runs]
    Console().print(summary_table(summaries, title=base))
    for message in first_errors(runs):
        console.print(f"[red]failed:[/red] {message}", highlight=False)
    if json is not None:
        document = {
            "url": base,
            "prompts": str(prompts) if prompts else "bundled",
            "sampling": asdict(sampling),
            "machine": machine_facts(),
            "runs": [asdict(summary) for summary in summaries],
        }
        write_json(json, document)
    if any(summary.errors for summary in summaries):
        raise typer.Exit(1)
