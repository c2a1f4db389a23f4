"""From two readings to the figures that matter."""

import msgspec

from adaspec.monitor.scrape import Scrape

BASE = "0"
_PASSES = "adaspec_target_passes_total"
_COMMITTED = "adaspec_committed_tokens_total"
_ACCEPTED = "adaspec_accepted_tokens_total"
_ENOUGH_PASSES = 200  # of a version, to be called the best


class VersionFigures(msgspec.Struct, frozen=True):
    """All steps of a drafter version since the server started.

    Attributes:
        gain: over the frozen base in control windows, relative, and its standard error; None
            without control windows.
    """

    version: int
    passes: int
    committed_per_pass: float
    gain: float | None
    gain_error: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two readings, or since the server started.

    Attributes:
        seconds: between the readings; None if there is only one, and totals are since the start.
        tokens_per_s: tokens committed; None with one reading.
        committed_per_pass: of the live version, between the readings; of all versions with one.
            None without a pass.
        base, best: what the frozen base and the best version have committed per pass in all;
            None without enough of it.
        acceptance: of the live version, by block position from 1: accepted drafts over passes.
        verify_lengths: share of the passes by verify length.
        decided_by: share of the planned steps by what decided.
        plain_tokens_per_s: what plain decoding would commit with as many requests, from the table
            of step times; None without it.
        collapse: why acceptance is far under expectation, by the server's diagnosis; None if it is
            not.
        sent_bytes_per_s: feedback; None with one reading.
        dropped: feedback records since the start, by reason.
        learner: what it says of itself (`docs/metrics.md`); empty without one.
        verdicts: gate decisions by action.
        judged: committed tokens per pass in the last replay, of candidate, incumbent and base.
    """

    seconds: float | None
    live_version: int
    running: int
    queued: int
    tokens_per_s: float | None
    committed_per_pass: float | None
    base: float | None
    best: VersionFigures | None
    versions: list[VersionFigures]
    acceptance: list[float]
    verify_lengths: dict[int, float]
    decided_by: dict[str, float]
    plain_tokens_per_s: float | None
    swaps: int
    rollbacks: int
    refused: int
    audit_failures: int
    collapse: str | None
    sent: int
    sent_bytes_per_s: float | None
    dropped: dict[str, int]
    learner: dict[str, float]
    verdicts: dict[str, int]
    judged: dict[str, float]


def figures(now: Scrape, before: Scrape | None = None) -> Figures:
    """The figures of a reading and an earlier one of the same run of the server."""
    then = before or Scrape(now.time)
    seconds = now.time - then.time if before is not None else None

    def rate(name: str) -> float | None:
        if seconds is None or seconds <= 0:
            return None
        return (now.total(name) - then.total(name)) / seconds

    live = now.total("adaspec_live_version")
    version = str(int(live))
    labels = {} if before is None else {"version": version}
    passes = now.total(_PASSES, **labels) - then.total(_PASSES, **labels)
    committed = now.total(_COMMITTED, **labels) - then.total(_COMMITTED, **labels)
    versions = _versions(now)
    ranked = [v for v in versions if v.passes >= _ENOUGH_PASSES]
    outcomes = now.by("adaspec_feedback_records_total", "outcome")
    swaps = now.by("adaspec_swaps_total", "cause")
    return Figures(
        seconds=seconds,
        live_version=int(live),
        running=int(now.running),
        queued=int(now.queued),
        tokens_per_s=rate(_COMMITTED),
        committed_per_pass=committed / passes if passes else None,
        base=next((v.committed_per_pass for v in versions if v.version == 0 and v.passes), None),
        best=max(ranked, key=lambda v: v.committed_per_pass, default=None),
        versions=versions,
        acceptance=_acceptance(now, then, labels, passes),
        verify_lengths={
            int(length): share
            for length, share in _shares(
                now.by(_PASSES, "verify_length"), then.by(_PASSES, "verify_length")
            ).items()
        },
        decided_by=_shares(
            now.by("adaspec_planned_steps_total", "reason"),
            then.by("adaspec_planned_steps_total", "reason"),
        ),
        plain_tokens_per_s=_plain(now),
        swaps=int(swaps.get("publish", 0)),
        rollbacks=int(swaps.get("rollback", 0)),
        refused=int(now.total("adaspec_refused_versions_total")),
        audit_failures=int(now.total("adaspec_audit_failures_total")),
        collapse=next(
            (cause for cause, on in now.by("adaspec_collapse", "cause").items() if on), None
        ),
        sent=int(outcomes.pop("sent", 0)),
        sent_bytes_per_s=rate("adaspec_feedback_bytes_total"),
        dropped={reason: int(count) for reason, count in outcomes.items() if count},
        learner=now.by("adaspec_learner", "quantity"),
        verdicts={
            action: int(count)
            for action, count in now.by("adaspec_gate_verdicts_total", "action").items()
        },
        judged=now.by("adaspec_gate_committed_per_pass", "drafter"),
    )


def _versions(now: Scrape) -> list[VersionFigures]:
    passes, committed = now.by(_PASSES, "version"), now.by(_COMMITTED, "version")
    gains = now.by("adaspec_gain_over_base", "version")
    errors = now.by("adaspec_gain_over_base_error", "version")
    return [
        VersionFigures(
            int(version), int(count), committed.get(version, 0.0) / count,
            gains.get(version), errors.get(version),
        )
        for version, count in sorted(passes.items(), key=lambda item: int(item[0]))
        if count
    ]  # fmt: skip


def _acceptance(now: Scrape, then: Scrape, labels: dict[str, str], passes: float) -> list[float]:
    if not passes:
        return []
    counts = now.by(_ACCEPTED, "position", **labels)
    earlier = then.by(_ACCEPTED, "position", **labels)
    longest = max((int(position) for position in counts), default=0)
    return [
        (counts.get(str(p), 0.0) - earlier.get(str(p), 0.0)) / passes for p in range(1, longest + 1)
    ]


def _shares(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
    counts = {key: value - then.get(key, 0.0) for key, value in now.items()}
    total = sum(counts.values())
    return {key: count / total for key, count in counts.items() if count > 0} if total else {}


def _plain(now: Scrape) -> float | None:
    """Plain decoding of the running requests, by the nearest batch of the table of step times."""
    times = now.by("adaspec_cost_seconds", "batch", kind="plain")
    running = int(now.running)
    if not times or running < 1:
        return None
    nearest = min(times, key=lambda batch: abs(int(batch) - running))
    return running / times[nearest] if times[nearest] > 0 else None
