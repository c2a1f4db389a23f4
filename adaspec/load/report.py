"""From load runs to figures: one summary per run, a table for people, JSON for machines."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from adaspec.load.client import RequestOutcome
from adaspec.load.runner import LoadRun
from adaspec.load.stats import median, percentile


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Figures of one run; times in seconds. ``None`` where nothing was measured.

    Attributes:
        output_tokens_per_s: generated tokens of complete answers over the wall time of the run.
        ttft_p50_s: time to first token (and ``ttft_p99_s``).
        tpot_p50_s: time per output token after the first (and ``tpot_p99_s``).
        committed_per_pass: generated tokens per verification pass of the target, over all complete
            answers; ``None`` if the server does not speculate.
        client_cpu_share: CPU time of this process over wall time; near 1 the client is the limit.
        errors: requests that did not complete.
    """

    concurrency: int
    repeat: int
    requests: int
    errors: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    committed_per_pass: float | None
    client_cpu_share: float


def summarize(run: LoadRun) -> RunSummary:
    """The figures of one run; requests that failed count as errors and in nothing else."""
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    tokens = sum(outcome.completion_tokens for outcome in complete)
    firsts = [t for o in complete if (t := o.time_to_first_token_s) is not None]
    per_token = [t for o in complete if (t := o.time_per_output_token_s) is not None]
    speculated = [(o.completion_tokens, o.target_passes) for o in complete if o.target_passes]
    passes = sum(count for _, count in speculated)
    return RunSummary(
        concurrency=run.plan.concurrency,
        repeat=run.repeat,
        requests=len(run.outcomes),
        errors=len(run.outcomes) - len(complete),
        wall_s=run.wall_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / run.wall_s,
        ttft_p50_s=percentile(firsts, 50),
        ttft_p99_s=percentile(firsts, 99),
        tpot_p50_s=percentile(per_token, 50),
        tpot_p99_s=percentile(per_token, 99),
        committed_per_pass=sum(t for t, _ in speculated) / passes if passes else None,
        client_cpu_share=run.client_cpu_s / run.wall_s,
    )


def steady_tokens_per_s(run: LoadRun) -> float | None:
    """Tokens per second while all of the concurrency was in use; None if that was no time.

    That is until the last request was sent. After it the load fades out, the longer the more the
    answers' speeds differ, and the rate of the whole run would tell of that fading, too. A request
    counts as evenly generating between its first and its last text.
    """
    begin = min(outcome.started_s for outcome in run.outcomes)
    end = max(outcome.started_s for outcome in run.outcomes)
    if len(run.outcomes) <= run.plan.concurrency or end <= begin:
        return None
    tokens = sum(_tokens_until(end, outcome) for outcome in run.outcomes)
    return tokens / (end - begin)


def _tokens_until(moment: float, outcome: RequestOutcome) -> float:
    first, finished = outcome.first_token_s, outcome.finished_s
    if outcome.error is not None or first is None or moment < first:
        return 0.0
    if moment >= finished:
        return outcome.completion_tokens
    return 1 + (outcome.completion_tokens - 1) * (moment - first) / (finished - first)


def first_errors(runs: Sequence[LoadRun], limit: int = 3) -> list[str]:
    """The first few distinct error messages, in order."""
    messages = (o.error for run in runs for o in run.outcomes if o.error is not None)
    return list(dict.fromkeys(messages))[:limit]


def summary_table(summaries: Sequence[RunSummary], title: str) -> Table:
    """One row per concurrency, every cell the median over the repeats."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, caption="medians over the runs; TTFT and TPOT in ms"
    )
    for heading in (
        "in flight", "runs", "tokens\n/s", "TTFT\np50", "TTFT\np99", "TPOT\np50", "TPOT\np99",
        "commit\n/pass", "errors",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for concurrency in dict.fromkeys(s.concurrency for s in summaries):
        rows = [s for s in summaries if s.concurrency == concurrency]
        table.add_row(
            str(concurrency),
            str(len(rows)),
            _cell([s.output_tokens_per_s for s in rows], digits=1),
            _cell([s.ttft_p50_s for s in rows], 1e3, digits=0),
            _cell([s.ttft_p99_s for s in rows], 1e3, digits=0),
            _cell([s.tpot_p50_s for s in rows], 1e3, digits=1),
            _cell([s.tpot_p99_s for s in rows], 1e3, digits=1),
            _cell([s.committed_per_pass for s in rows], digits=2),
            str(sum(s.errors for s in rows)),
        )
    return table


def _cell(values: Sequence[float | None], scale: float = 1.0, *, digits: int) -> str:
    middle = median([value for value in values if value is not None])
    return "-" if middle is None else f"{middle * scale:.{digits}f}"
