"""`adaspec traffic`: traffic whose load and kind change, and what it commits along the way."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from adaspec.cli.files import check_writable, write_json
from adaspec.load.client import Sampling
from adaspec.load.machine import machine_facts
from adaspec.load.report import RunSummary, first_errors, summarize
from adaspec.load.stages import Stage, load_stage_prompts, parse_stage, run_stages

_HEADING = "prompts       in flight  requests  tokens/s  TTFT p50  TPOT p50  TPOT p99  commit/pass"


def traffic(
    url: Annotated[str, typer.Argument(help="Base URL, for example http://127.0.0.1:30000.")],
    stages: Annotated[
        list[str], typer.Argument(help="CONCURRENCYxREQUESTS[:PROMPTS.jsonl], in their order.")
    ],
    every: Annotated[int | None, typer.Option(min=1, help="Requests for each line.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per request.")] = 128,
    spread: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of --max-tokens between requests, a share.")
    ] = 0.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Send traffic in stages: a ramp (1x16 8x64 32x128 8x64), another domain (4x100:french.jsonl).

    Prints a line for each stage, or for every few requests. Exits with code 1 if any failed.
    """
    wanted = [parse_stage(text) for text in stages]
    prompts = load_stage_prompts(wanted)
    if json is not None:
        check_writable(json, "--json")
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, spread=spread)
    base = url.rstrip("/")
    print(_HEADING, flush=True)
    summaries: list[tuple[Stage, RunSummary]] = []
    for stage, run in run_stages(base, wanted, prompts, sampling, every):
        summary = summarize(run)
        summaries.append((stage, summary))
        print(line(stage, summary), flush=True)
        for message in first_errors([run]):
            typer.secho(f"failed: {message}", err=True, fg=typer.colors.RED)
    if json is not None:
        document = {
            "url": base,
            "stages": stages,
            "sampling": asdict(sampling),
            "machine": machine_facts(),
            "runs": [{"prompts": stage.name} | asdict(summary) for stage, summary in summaries],
        }
        write_json(json, document)
    if any(summary.errors for _, summary in summaries):
        raise typer.Exit(1)


def line(stage: Stage, summary: RunSummary) -> str:
    """One line of the table; times in milliseconds."""

    def cell(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
        return f"{'-' if value is None else f'{scale * value:.{digits}f}':>{width}}"

    return (
        f"{stage.name[:12]:<12}  {stage.concurrency:>9}  {summary.requests:>8}"
        f"  {cell(summary.output_tokens_per_s, 8, 1)}"
        f"  {cell(summary.ttft_p50_s, 8, 0, 1e3)}"
        f"  {cell(summary.tpot_p50_s, 8, 1, 1e3)}"
        f"  {cell(summary.tpot_p99_s, 8, 1, 1e3)}"
        f"  {cell(summary.committed_per_pass, 11, 2)}"
    )
