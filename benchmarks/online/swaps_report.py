"""The figures of `benchmarks.online.swaps`: what a run is, what is compared, what is printed."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adaspec.load.report import RunSummary
from adaspec.load.stats import median, ratio_of_medians

SERVERS = ("off", "tap", "swaps")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One server under load once; times in seconds.

    Attributes:
        gap_p50_s, gap_p99_s, gap_max_s: over all gaps of all complete answers.
        step_s: median over the answers of the time of a decode step.
        feedback_bytes_per_s: sent, over the wall time of the run.
        feedback: records by what became of them.
        pauses_s: of every swap of the run that the server has proved.
    """

    server: str
    summary: RunSummary
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    step_s: float
    feedback_bytes_per_s: float
    feedback: dict[str, int]
    swaps: int
    pauses_s: tuple[float, ...]


def ratios(runs: Sequence[Run], level: int, name: str, over: str, figure: str) -> dict[str, float]:
    """A figure of one server relative to another's, with a 95 % interval over paired repeats."""
    values = [
        [
            figures(run)[figure]
            for run in runs
            if (run.server, run.summary.concurrency) == (s, level)
        ]
        for s in (name, over)
    ]
    ratio, low, high = ratio_of_medians(*values)
    return {"ratio": ratio, "low": low, "high": high}


def chosen(runs: Sequence[Run], level: int, server: str) -> list[Run]:
    """The runs of one server at one concurrency, in the order of the repeats."""
    return [run for run in runs if (run.server, run.summary.concurrency) == (server, level)]


def figures(run: Run) -> dict[str, float]:
    """What is compared between servers."""
    return {
        "tokens_per_s": run.summary.output_tokens_per_s,
        "gap_p50": run.gap_p50_s,
        "gap_p99": run.gap_p99_s,
        "gap_max": run.gap_max_s,
        "tpot_p50": run.summary.tpot_p50_s or 0.0,
        "tpot_p99": run.summary.tpot_p99_s or 0.0,
        "committed": run.summary.committed_per_pass or 0.0,
    }


def comparisons(runs: Sequence[Run], levels: Sequence[int]) -> list[dict[str, object]]:
    """The ratios that answer the benchmark's questions, for the JSON result."""
    pairs = (("tap", "off"), ("swaps", "off"), ("swaps", "tap"))
    names = ("tokens_per_s", "gap_p50", "gap_p99", "tpot_p50", "tpot_p99")
    return [
        {"concurrency": level, "server": name, "over": over, "figure": figure}
        | ratios(runs, level, name, over, figure)
        for level, (name, over), figure in itertools.product(levels, pairs, names)
    ]


def report(runs: Sequence[Run], levels: Sequence[int]) -> str:
    """Medians over the repeats, then what tap and swaps did."""
    lines = [
        "c    server    tok/s  x off  [95 %]       gap p50   p99    x off  [95 %]        max"
        "   TPOT p50   p99  commit  errors"
    ]
    for level, name in itertools.product(levels, SERVERS):
        found = chosen(runs, level, name)
        middle = {key: median([figures(r)[key] for r in found]) or 0.0 for key in figures(found[0])}
        ms = {key: f"{1e3 * value:.1f}" for key, value in middle.items()}
        speed, p99 = (ratios(runs, level, name, "off", f) for f in ("tokens_per_s", "gap_p99"))
        lines.append(
            f"{level:<4} {name:<6} {middle['tokens_per_s']:>8.1f}  {_interval(speed)}  "
            f"{ms['gap_p50']:>8} {ms['gap_p99']:>6}  {_interval(p99)} {ms['gap_max']:>8}  "
            f"{ms['tpot_p50']:>7} {ms['tpot_p99']:>6}  {middle['committed']:>6.2f}  "
            f"{sum(run.summary.errors for run in found):>5}"
        )
    lines.append("times in ms, medians over the repeats")
    for level, name in itertools.product(levels, SERVERS[1:]):
        found = chosen(runs, level, name)
        rate = (median([run.feedback_bytes_per_s for run in found]) or 0.0) / 1e6
        records: Counter[str] = Counter()
        for run in found:
            records.update(run.feedback)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(records.items()))
        lines.append(
            f"c={level} {name}: {rate:.2f} MB/s of feedback; records: {outcomes or 'none'}"
        )
        if pauses := [pause for run in found for pause in run.pauses_s]:
            step = median([run.step_s for run in found]) or 0.0
            lines.append(
                f"c={level} {name}: {sum(run.swaps for run in found)} swaps in "
                f"{sum(run.summary.wall_s for run in found):.0f} s; pause median "
                f"{1e3 * (median(pauses) or 0.0):.2f} ms, longest {1e3 * max(pauses):.2f} ms = "
                f"{max(pauses) / step:.2f} decode steps of {1e3 * step:.1f} ms"
            )
    return "\n".join(lines)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:5.3f} [{ratio['low']:.3f} {ratio['high']:.3f}]"
