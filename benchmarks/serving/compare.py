"""Plain decoding, stock DFLASH and ADASPEC under the same load, in one run.

    python benchmarks/serving/compare.py --prompts prompts.jsonl --out result.json

One server is up at a time. Every repeat starts each of them afresh, in an order that rotates, and
loads it with the same prompts at every concurrency; so a slow minute of the machine does not fall
on one contender alone. Reported are medians over the repeats, and the ratio of the median tokens/s
to plain decoding with a bootstrap interval over paired repeats.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.client import Sampling
from adaspec.load.contenders import Contender, parse_contender
from adaspec.load.launch import free_port, running_server
from adaspec.load.machine import machine_facts
from adaspec.load.prompts import load_prompts
from adaspec.load.report import RunSummary, summarize
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.load.stats import median, ratio_of_medians
from adaspec.target.smollm2 import ensure_smollm2

DEFAULT_CONTENDERS = ("plain", "dflash", "adaspec", "adaspec-8", "adaspec-4")

Results = dict[str, list[RunSummary]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a repetition of the run needs, apart from the machine.

    Attributes:
        waves: requests of a run are ``waves * concurrency``, but at least ``min_requests``.
    """

    target: str
    drafter: str
    prompts: str
    contenders: tuple[str, ...]
    concurrency: tuple[int, ...]
    repeats: int
    waves: int
    min_requests: int
    sampling: Sampling
    dtype: str | None
    server_args: tuple[str, ...]

    def plans(self) -> list[LoadPlan]:
        """One plan per concurrency."""
        return [
            LoadPlan(
                concurrency=level,
                requests=max(self.min_requests, self.waves * level),
                warmup=level,
                sampling=self.sampling,
            )
            for level in self.concurrency
        ]


def measure(
    comparison: Comparison, prompts: Sequence[str], logs: Path, console: Console
) -> Results:
    """Summaries of every contender, repeats outermost, the order rotated by one each repeat."""
    contenders = [parse_contender(name) for name in comparison.contenders]
    results: Results = {contender.name: [] for contender in contenders}
    for repeat in range(comparison.repeats):
        shift = repeat % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            for summary in _one_server(comparison, contender, prompts, repeat, logs):
                results[contender.name].append(summary)
                console.print(
                    f"repeat {repeat + 1} of {comparison.repeats}  {contender.name:<10} "
                    f"concurrency {summary.concurrency:<3} {summary.output_tokens_per_s:7.1f} tok/s"
                    f"  {summary.errors} errors"
                )
    return results


def _one_server(
    comparison: Comparison, contender: Contender, prompts: Sequence[str], repeat: int, logs: Path
) -> list[RunSummary]:
    spec = contender.server(
        target=comparison.target,
        drafter=comparison.drafter,
        port=free_port(),
        directory=logs,
        dtype=comparison.dtype,
        extra=comparison.server_args,
    )
    with running_server(spec, log=logs / f"{contender.name}-{repeat}.log") as server:
        runs = run_plans(server.url, prompts, comparison.plans(), flush_cache=True)
    return [summarize(run) for run in runs]


def table(results: Results, levels: Sequence[int]) -> Table:
    """Medians over the repeats, and ratios to plain decoding where that was measured."""
    view = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="medians over the repeats; TTFT and TPOT in ms",
    )
    for heading in (
        "in\nflight", "server", "tokens\n/s", "x\nplain", "95 %", "TTFT\np50", "TPOT\np50",
        "commit\n/pass", "errors",
    ):  # fmt: skip
        view.add_column(heading, justify="left" if heading == "server" else "right", no_wrap=True)
    for level in levels:
        for name, summaries in results.items():
            rows = [s for s in summaries if s.concurrency == level]
            view.add_row(
                str(level),
                name,
                _cell([s.output_tokens_per_s for s in rows], 1.0, 1),
                *_ratio(results, name, level),
                _cell([s.ttft_p50_s for s in rows], 1e3, 0),
                _cell([s.tpot_p50_s for s in rows], 1e3, 1),
                _cell([s.committed_per_pass for s in rows], 1.0, 2),
                str(sum(s.errors for s in rows)),
            )
        view.add_section()
    return view


def ratios(results: Results, levels: Sequence[int]) -> list[dict[str, object]]:
    """Tokens/s relative to plain decoding, with a 95 % interval, for the JSON result."""
    found: list[dict[str, object]] = []
    for level in levels:
        for name in results:
            if name != "plain" and "plain" in results:
                ratio, low, high = _against_plain(results, name, level)
                found.append(
                    {"concurrency": level, "server": name, "ratio": ratio, "low": low, "high": high}
                )
    return found


def _against_plain(results: Results, name: str, level: int) -> tuple[float, float, float]:
    speeds = {
        server: [s.output_tokens_per_s for s in results[server] if s.concurrency == level]
        for server in (name, "plain")
    }
    return ratio_of_medians(speeds[name], speeds["plain"])


def _ratio(results: Results, name: str, level: int) -> tuple[str, str]:
    if name == "plain" or "plain" not in results:
        return "-", "-"
    ratio, low, high = _against_plain(results, name, level)
    return f"{ratio:.2f}", f"{low:.2f}-{high:.2f}"


def _cell(values: Sequence[float | None], scale: float, digits: int) -> str:
    middle = median([value for value in values if value is not None])
    return "-" if middle is None else f"{middle * scale:.{digits}f}"


def main(
    out: Annotated[Path, typer.Option(help="JSON result.")],
    prompts: Annotated[Path | None, typer.Option(help="JSONL; default: bundled.")] = None,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[Path, typer.Option(help="Drafter of the target.")] = BUNDLED_DRAFTER,
    server: Annotated[
        list[str] | None, typer.Option(help="plain, dflash, adaspec or adaspec-N; repeatable.")
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option("--concurrency", "-c", min=1)] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    waves: Annotated[int, typer.Option(min=1, help="Requests per unit of concurrency.")] = 4,
    min_requests: Annotated[int, typer.Option(min=1, help="Fewest requests of a run.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="SGLang's --dtype.")] = None,
    server_args: Annotated[str, typer.Option(help="More of SGLang's options, for all.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
) -> None:
    """Compare ways of serving; prints a table and writes every run to a JSON file."""
    console = Console(highlight=False)
    comparison = Comparison(
        target=target or str(ensure_smollm2(progress=console.print)),
        drafter=str(drafter),
        prompts=str(prompts) if prompts else "bundled",
        contenders=tuple(dict.fromkeys(server or DEFAULT_CONTENDERS)),
        concurrency=tuple(concurrency or (1, 4, 8)),
        repeats=repeats,
        waves=waves,
        min_requests=min_requests,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
        dtype=dtype,
        server_args=tuple(server_args.split()),
    )
    texts = load_prompts(prompts)
    out.touch()
    with tempfile.TemporaryDirectory(prefix="adaspec-compare-") as scratch:
        directory = logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results = measure(comparison, texts, directory, console)
    document = {
        "machine": machine_facts(),
        "comparison": asdict(comparison),
        "ratios_to_plain": ratios(results, comparison.concurrency),
        "runs": {name: [asdict(s) for s in found] for name, found in results.items()},
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    console.print(table(results, comparison.concurrency))


if __name__ == "__main__":
    typer.run(main)
