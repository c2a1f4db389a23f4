"""From load runs to tables, verdicts and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from adaspec.load.report import first_errors, steady_tokens_per_s, summarize
from adaspec.load.runner import LoadRun
from adaspec.load.stats import median, percentile, ratio_of_medians

OURS = "goodput"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One load with one contender, once.

    Attributes:
        tokens_per_s: generated tokens over wall time, of all closed loops of the load together; of
            a single one while it was full (`steady_tokens_per_s`).
        tpot_p50_s: time per output token after the first, over requests (and ``tpot_p99_s``).
        committed_per_pass: None if the server does not speculate.
        client_cpu_share: the highest of a closed loop; near 1 the client is the limit.
        messages: of the first errors.
    """

    contender: str
    load: str
    repeat: int
    tokens_per_s: float
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    committed_per_pass: float | None
    client_cpu_share: float
    errors: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`OURS` against one contender under one load: ratio of median tokens/s, 95 % interval."""

    load: str
    against: str
    is_best_other: bool
    ratio: float
    low: float
    high: float


def measured(contender: str, load: str, repeat: int, runs: Sequence[LoadRun]) -> Measured:
    """The figures of a load from its closed loops."""
    summaries = [summarize(run) for run in runs]
    outcomes = [outcome for run in runs for outcome in run.outcomes if outcome.error is None]
    times = [t for o in outcomes if (t := o.time_per_output_token_s) is not None]
    passes = sum(o.target_passes or 0 for o in outcomes)
    tokens = sum(s.output_tokens for s in summaries)
    steady = steady_tokens_per_s(runs[0]) if len(runs) == 1 else None
    return Measured(
        contender=contender,
        load=load,
        repeat=repeat,
        tokens_per_s=steady or tokens / sum(s.wall_s for s in summaries),
        tpot_p50_s=percentile(times, 50),
        tpot_p99_s=percentile(times, 99),
        committed_per_pass=tokens / passes if passes else None,
        client_cpu_share=max(s.client_cpu_share for s in summaries),
        errors=sum(s.errors for s in summaries),
        messages=tuple(first_errors(runs)),
    )


def verdicts(results: Sequence[Measured]) -> list[Verdict]:
    """`OURS` against plain decoding and every fixed length, under every load."""
    names = list(dict.fromkeys(r.contender for r in results))
    others = [name for name in names if name == "plain" or name.startswith("fixed-")]
    found = []
    for load in dict.fromkeys(r.load for r in results) if OURS in names else ():
        speeds = {name: _values(results, name, load, "tokens_per_s") for name in (OURS, *others)}
        # A repeat that not every contender has been through yet is left out.
        whole = min(map(len, speeds.values()))
        if whole == 0:
            continue
        speeds = {name: values[:whole] for name, values in speeds.items()}
        best = max(others, key=lambda name, speeds=speeds: median(speeds[name]), default=None)
        for name in others:
            ratio, low, high = ratio_of_medians(speeds[OURS], speeds[name])
            found.append(
                Verdict(
                    load=load,
                    against=name,
                    is_best_other=name == best,
                    ratio=ratio,
                    low=low,
                    high=high,
                )
            )
    return found


def table(results: Sequence[Measured]) -> Table:
    """Medians over the repeats, one block for each load."""
    view = Table(
        box=box.SIMPLE_HEAD,
        caption=f"medians over the repeats; TPOT in ms; ratio: {OURS} to that contender, and 95 %",
    )
    for heading in (
        "load", "policy", "tokens\n/s", "TPOT\np50", "TPOT\np99", "commit\n/pass", "ratio", "95 %",
        "errors",
    ):  # fmt: skip
        left = heading in ("load", "policy")
        view.add_column(heading, justify="left" if left else "right", no_wrap=True)
    ratios = {(v.load, v.against): v for v in verdicts(results)}
    for load in dict.fromkeys(r.load for r in results):
        for name in dict.fromkeys(r.contender for r in results):
            verdict = ratios.get((load, name))
            best = "*" if verdict is not None and verdict.is_best_other else ""
            view.add_row(
                load,
                name + best,
                _cell(_values(results, name, load, "tokens_per_s"), 1.0, 1),
                _cell(_values(results, name, load, "tpot_p50_s"), 1e3, 1),
                _cell(_values(results, name, load, "tpot_p99_s"), 1e3, 1),
                _cell(_values(results, name, load, "committed_per_pass"), 1.0, 2),
                "-" if verdict is None else f"{verdict.ratio:.3f}",
                "-" if verdict is None else f"{verdict.low:.2f}-{verdict.high:.2f}",
                str(int(sum(_values(results, name, load, "errors")))),
            )
        view.add_section()
    return view


def draw(results: Sequence[Measured], path: Path) -> None:
    """Throughput and time per output token over concurrency; bars span the repeats."""
    from matplotlib.figure import Figure

    levels = {
        load: int(load.removeprefix("c="))
        for load in dict.fromkeys(r.load for r in results)
        if load.startswith("c=")
    }
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    panels = (
        ("tokens_per_s", 1.0, "tokens/s"),
        ("tpot_p50_s", 1e3, "time per output token, p50 (ms)"),
        ("tpot_p99_s", 1e3, "time per output token, p99 (ms)"),
    )
    for axes, (key, scale, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in dict.fromkeys(r.contender for r in results):
            rows = {
                level: [scale * v for v in _values(results, name, load, key)]
                for load, level in levels.items()
            }
            rows = {level: values for level, values in rows.items() if values}
            middles = {level: median(values) or 0.0 for level, values in rows.items()}
            spread = [
                [middles[level] - min(values) for level, values in rows.items()],
                [max(values) - middles[level] for level, values in rows.items()],
            ]
            axes.errorbar(
                list(middles),
                list(middles.values()),
                yerr=spread,
                label=name,
                capsize=2,
                linewidth=2.5 if name == OURS else 1.2,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(levels.values()), [str(level) for level in levels.values()])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)


def _values(results: Sequence[Measured], contender: str, load: str, key: str) -> list[float]:
    rows = [r for r in results if r.contender == contender and r.load == load]
    values = [getattr(r, key) for r in sorted(rows, key=lambda r: r.repeat)]
    return [value for value in values if value is not None]


def _cell(values: Sequence[float], scale: float, digits: int) -> str:
    middle = median(values)
    return "-" if middle is None else f"{middle * scale:.{digits}f}"
