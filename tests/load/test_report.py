"""Figures computed from outcomes, against values worked out by hand."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from adaspec.load.client import RequestOutcome, Sampling
from adaspec.load.report import first_errors, steady_tokens_per_s, summarize, summary_table
from adaspec.load.runner import LoadPlan, LoadRun
from adaspec.load.stats import percentile, ratio_of_medians


def outcome(
    first: float | None = 1.0, last: float = 2.0, tokens: int = 11, passes: int | None = 4,
    error: str | None = None,
) -> RequestOutcome:  # fmt: skip
    return RequestOutcome(
        started_s=0.5, first_token_s=first, finished_s=last, completion_tokens=tokens,
        target_passes=passes, error=error,
    )  # fmt: skip


def run_of(*outcomes: RequestOutcome, concurrency: int = 2, repeat: int = 0) -> LoadRun:
    plan = LoadPlan(concurrency=concurrency, requests=len(outcomes), warmup=0, sampling=Sampling())
    return LoadRun(plan=plan, repeat=repeat, wall_s=4.0, client_cpu_s=1.0, outcomes=outcomes)


def test_summary_by_hand() -> None:
    failed = outcome(first=1.5, tokens=0, passes=None, error="HTTP 400")
    summary = summarize(run_of(outcome(), outcome(first=0.7, last=3.7, tokens=31), failed))
    assert summary.errors == 1
    assert summary.output_tokens_per_s == pytest.approx(42 / 4)
    assert summary.ttft_p50_s == pytest.approx((0.5 + 0.2) / 2)
    assert summary.tpot_p99_s == pytest.approx(0.1)
    assert summary.committed_per_pass == pytest.approx(42 / 8)
    assert summary.client_cpu_share == pytest.approx(0.25)


def test_a_steady_rate_leaves_out_the_end_of_a_run() -> None:
    def at(started: float, first: float, last: float, tokens: int) -> RequestOutcome:
        return replace(outcome(first=first, last=last, tokens=tokens), started_s=started)

    # Two in flight; the third is sent when the first ends, at 3, and runs on alone.
    run = run_of(at(0.0, 1.0, 3.0, 21), at(0.0, 1.0, 5.0, 41), at(3.0, 4.0, 9.0, 51))
    assert steady_tokens_per_s(run) == pytest.approx((21 + 21 + 0) / 3)
    failed = at(0.0, 1.0, 5.0, 41)
    failed = replace(failed, error="HTTP 500")
    assert steady_tokens_per_s(run_of(run.outcomes[0], failed, run.outcomes[2])) == 21 / 3


def test_a_run_that_was_never_refilled_has_no_steady_rate() -> None:
    assert steady_tokens_per_s(run_of(outcome(), outcome())) is None


def test_without_speculation_or_answers_figures_are_absent() -> None:
    assert summarize(run_of(outcome(passes=None))).committed_per_pass is None
    nothing = summarize(run_of(outcome(first=None, tokens=0, error="ConnectError")))
    assert nothing.ttft_p50_s is None
    assert nothing.tpot_p50_s is None
    assert nothing.output_tokens_per_s == 0


def test_one_token_has_no_time_per_output_token() -> None:
    assert outcome(tokens=1).time_per_output_token_s is None


def test_errors_are_listed_once() -> None:
    runs = [run_of(*(outcome(error=e) for e in ("a", "b", "a"))), run_of(outcome(error="c"))]
    assert first_errors(runs, limit=2) == ["a", "b"]


def test_table_shows_medians_per_concurrency() -> None:
    runs = [run_of(outcome(tokens=t), repeat=r) for r, t in enumerate((40, 80, 400))]
    runs.append(run_of(outcome(tokens=8), concurrency=8))
    buffer = io.StringIO()
    Console(file=buffer, width=200).print(summary_table([summarize(r) for r in runs], "title"))
    rows = {cells[0]: cells for line in buffer.getvalue().splitlines() if (cells := line.split())}
    assert rows["2"][1:3] == ["3", "20.0"]
    assert rows["8"][1:3] == ["1", "2.0"]


def test_percentile_of_nothing_is_nothing() -> None:
    assert percentile([], 50) is None
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0


def test_ratio_interval_holds_the_ratio_and_shrinks_to_it_without_noise() -> None:
    assert ratio_of_medians([3.0] * 5, [2.0] * 5) == pytest.approx((1.5, 1.5, 1.5))
    ratio, low, high = ratio_of_medians([9.0, 10.0, 11.0, 12.0], [5.0, 5.0, 5.0, 5.0])
    assert low < ratio < high
    assert (low, high) == pytest.approx((9 / 5, 12 / 5))


def test_paired_noise_cancels() -> None:
    slow_machine = [1.0, 0.5, 0.25]
    _, low, high = ratio_of_medians([2 * s for s in slow_machine], slow_machine)
    assert (low, high) == pytest.approx((2.0, 2.0))


def test_unpaired_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="paired"):
        ratio_of_medians([1.0], [1.0, 2.0])


def test_lengths_are_spread_evenly_and_alike_every_time() -> None:
    asked = [Sampling(max_tokens=100, spread=0.5).of_request(n).max_tokens for n in range(200)]
    again = [Sampling(max_tokens=100, spread=0.5).of_request(n).max_tokens for n in range(200)]
    assert asked == again
    assert 50 <= min(asked) < 53
    assert 147 < max(asked) <= 150
    assert sum(asked) / len(asked) == pytest.approx(100, abs=1)
    assert Sampling(max_tokens=7).of_request(3) == Sampling(max_tokens=7)
