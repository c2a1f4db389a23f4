"""A report for the terminal."""

import time
from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from adaspec.monitor.figures import Figures
from adaspec.monitor.follow import Report

_BAR = 24  # characters
_MOST_VERSIONS = 8
_MOST_POSITIONS = 16
_MOST_DECISIONS = 4


def render(report: Report) -> RenderableType:
    """Everything in one column that fits a narrow terminal."""
    parts: list[RenderableType] = [_head(report)]
    known = report.figures
    if known is not None:
        parts += [_speed(known), _versions(known), _acceptance(known), _loop(known)]
        if report.decisions:
            parts.append(_decisions(report))
        if len(report.timeline) > 1:
            parts.append(_timeline(report))
    parts += [Text(f"! {warning}", style="bold yellow") for warning in report.warnings]
    return Group(*parts)


def _head(report: Report) -> RenderableType:
    if report.figures is None:
        return Panel(Text(report.problem or "no answer yet", style="bold red"), title=report.url)
    if report.problem is not None:
        text = f"the figures below are {report.stale_s:.0f} s old: {report.problem}"
        return Panel(Text(text, style="bold red"), title=report.url)
    known = report.figures
    text = f"version {known.live_version} is live; {known.running} running, {known.queued} waiting"
    since = "since the start" if known.seconds is None else f"over {known.seconds:.0f} s"
    return Panel(Text(text, style="bold"), title=report.url, subtitle=since)


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _speed(known: Figures) -> Table:
    best = "-"
    if known.best is not None:
        best = f"{known.best.committed_per_pass:.2f} (version {known.best.version})"
    return _grid(
        [
            ("committed tokens per pass", f"now {_number(known.committed_per_pass, 2)}"
             f"   base {_number(known.base, 2)}   best {best}"),
            ("tokens/s", f"{_number(known.tokens_per_s, 0)}"
             f"   plain decoding, estimated {_number(known.plain_tokens_per_s, 0)}"),
            ("verify length", _list(known.verify_lengths)),
            ("decided by", _list(known.decided_by)),
        ]
    )  # fmt: skip


def _versions(known: Figures) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("version", "passes", "committed/pass", "gain over base"):
        table.add_column(heading, justify="right")
    for version in known.versions[-_MOST_VERSIONS:]:
        gain = "-"
        if version.gain is not None:
            gain = f"{version.gain:+.1%} ± {version.gain_error or 0.0:.1%}"
        live = "*" if version.version == known.live_version else ""
        table.add_row(
            f"{version.version}{live}",
            f"{version.passes:,}",
            f"{version.committed_per_pass:.2f}",
            gain,
        )
    return table


def _acceptance(known: Figures) -> Table:
    rows = []
    for position, share in enumerate(known.acceptance[:_MOST_POSITIONS], start=1):
        bar = "█" * round(share * _BAR)
        rows.append((f"draft {position} accepted", f"{share:5.0%} {bar}"))
    return _grid(rows)


def _loop(known: Figures) -> Table:
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(known.dropped.items()))
    rate = known.sent_bytes_per_s
    rows = [
        ("feedback", f"{known.sent:,} records sent, dropped: {dropped or 'none'}"
         + ("" if rate is None else f", {rate / 1e6:.2f} MB/s")),
        ("versions", f"{known.swaps} swapped in, {known.rollbacks} rolled back, "
         f"{known.refused} refused"),
    ]  # fmt: skip
    if not known.learner:
        return _grid([*rows, ("learner", "not heard of")])
    learner = known.learner
    rows += [
        ("learner", f"{learner.get('steps', 0):.0f} steps, loss {_number(learner.get('loss'), 3)}, "
         f"accuracy {_number(learner.get('accuracy'), 3)}, "
         f"{learner.get('learning_seconds', 0):.0f} s spent on learning{_held(learner)}"),
        ("gate", _list(known.verdicts, share=False) + "   replayed: "
         + ", ".join(f"{name} {value:.2f}" for name, value in sorted(known.judged.items()))),
    ]  # fmt: skip
    return _grid(rows)


def _held(learner: Mapping[str, float]) -> str:
    """What keeps it from learning: an operator (`adaspec control`), or nothing to gain."""
    words = [", " + state for state in ("paused", "resting") if learner.get(state)]
    pinned = learner.get("pinned", -1)
    return "".join(words) + (f", version {pinned:.0f} pinned" if pinned >= 0 else "")


def _decisions(report: Report) -> Table:
    return _grid(
        (f"{_clock(d.time)} {d.action or 'told'}", f"{d.reason}; version {d.live} live")
        for d in report.decisions[-_MOST_DECISIONS:]
    )


def _timeline(report: Report) -> Text:
    marks = []
    for change in report.timeline[-_MOST_VERSIONS:]:
        marks.append(
            f"{_clock(change.time)} {'restart, ' if change.restarted else ''}v{change.version}"
        )
    return Text("timeline  " + "  →  ".join(marks), style="dim")


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _list(
    values: "dict[int, float] | dict[str, float] | dict[str, int]", share: bool = True
) -> str:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{key}: {v:.0%}" if share else f"{key}: {v}" for key, v in ordered) or "-"
