"""Runs of the drift laboratory, summed up."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from benchmarks.drift import metrics
from benchmarks.drift.arms import STATIC
from benchmarks.drift.runs import Job, Run
from online.gate import tokens_per_pass
from online.shadow import Walk


def by_phase(run: Run, walks: Sequence[Walk]) -> dict[str, list[Walk]]:
    """Walks of each phase, in order."""
    found: dict[str, list[Walk]] = {}
    for phase, walk in zip(run.phases, walks, strict=True):
        found.setdefault(phase, []).append(walk)
    return found


def summarise(runs: Sequence[Run], chunk: int) -> list[dict[str, Any]]:
    """One row for each arm and scenario, all seeds together."""
    rows = []
    known = {run.job: run for run in runs}
    for arm, name in dict.fromkeys((run.job.arm, run.job.scenario) for run in runs):
        mine = [run for run in runs if (run.job.arm, run.job.scenario) == (arm, name)]
        static = [known[replace(run.job, arm=STATIC)] for run in mine]
        ours = list(itertools.chain.from_iterable(run.walks for run in mine))
        base = list(itertools.chain.from_iterable(run.walks for run in static))
        last = [by_phase(run, run.walks)[run.phases[-1]] for run in mine]
        last_base = [by_phase(run, run.walks)[run.phases[-1]] for run in static]
        late, late_base = (
            itertools.chain.from_iterable(last),
            itertools.chain.from_iterable(last_base),
        )
        forgotten = list(itertools.chain.from_iterable(run.afterwards for run in mine))
        before = list(itertools.chain.from_iterable(run.afterwards for run in static))
        regrets = []
        for run, unmoved in zip(mine, static, strict=True):
            references = [unmoved.walks, *_hindsight(known, run.job)]
            fixed = [by_phase(run, walks) for walks in references]
            regrets.append(metrics.regret(by_phase(run, run.walks), fixed))
        recovery = [
            metrics.requests_to_recover(a, b, chunk) for a, b in zip(last, last_base, strict=True)
        ]
        rows.append(
            {
                "arm": arm,
                "scenario": name,
                "seeds": len(mine),
                "committed_per_pass": tokens_per_pass(ours),
                "gain": asdict(metrics.gain(ours, base)),
                "gain_each_seed": [
                    metrics.gain(a.walks, b.walks).estimate
                    for a, b in zip(mine, static, strict=True)
                ],
                "last_phase": asdict(metrics.gain(list(late), list(late_base))),
                "regret": regrets,
                "requests_to_recover": recovery,
                "forgetting": asdict(metrics.gain(forgotten, before)),
                "seconds": sum(run.seconds for run in mine) / len(mine),
                "steps": mine[0].steps,
                "skipped": sum(run.skipped for run in mine),
            }
        )
    return rows


def _hindsight(known: Mapping[Job, Run], job: Job) -> list[list[Walk]]:
    run = known.get(replace(job, arm="default"))
    return run.checkpoints if run else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| drift | arm | tokens a pass | gain over static | in the last phase | regret "
        "| requests to recover | old domain afterwards | learning, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        regrets = sum(row["regret"]) / len(row["regret"])
        recovered = " / ".join("-" if n is None else str(n) for n in row["requests_to_recover"])
        lines.append(
            f"| {row['scenario']} | {row['arm']} | {row['committed_per_pass']:.2f} "
            f"| {_percent(row['gain'])} | {_percent(row['last_phase'])} | {regrets:.0f} "
            f"| {recovered} | {_percent(row['forgetting'])} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def _percent(found: Mapping[str, float]) -> str:
    estimate, low, high = (100 * found[key] for key in ("estimate", "low", "high"))
    return f"{estimate:+.1f} % [{low:+.1f}, {high:+.1f}]"
