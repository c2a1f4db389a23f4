"""A picture of a run: the reports of `adaspec monitor --log` over time, with version marks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adaspec.errors import AdaSpecError
from adaspec.monitor.figures import Figures
from adaspec.monitor.follow import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POSITIONS = (1, 2, 4, 8)


def read_log(path: Path) -> list[Report]:
    """The reports of a log, in its order; a last line that was cut off is left out.

    Raises:
        AdaSpecError: if it cannot be read, or another line is no report.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise AdaSpecError(
            f"{path} cannot be read ({error.strerror}); name a file that --log has written."
        ) from error
    reports = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            reports.append(msgspec.json.decode(line, type=Report))
        except msgspec.DecodeError as error:
            raise AdaSpecError(
                f"line {number} of {path} is no report ({error}); name a file that --log has "
                "written."
            ) from error
    return reports


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write a picture; its type follows from the name.

    Raises:
        AdaSpecError: if nothing was measured, or matplotlib is missing or does not know the type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AdaSpecError(
            "pictures need matplotlib; install it with `pip install adaspec[plot]`."
        ) from error
    known = [(r.time, r.figures) for r in reports if r.figures is not None and r.problem is None]
    if not known:
        raise AdaSpecError("no report of this log has figures; let the monitor run for a while.")
    start = known[0][0]
    picture = Figure(figsize=(10, 11), layout="constrained")
    upper, speed, drafts, stream = picture.subplots(4, 1, sharex=True)
    _lines(
        upper, known, start, "committed tokens per pass",
        {"now": lambda f: f.committed_per_pass, "base, in all": lambda f: f.base},
    )  # fmt: skip
    _lines(
        speed, known, start, "tokens/s",
        {"committed": lambda f: f.tokens_per_s,
         "plain decoding, estimated": lambda f: f.plain_tokens_per_s},
    )  # fmt: skip
    positions = {f"draft {p}": _accepted(p) for p in _POSITIONS}
    _lines(drafts, known, start, "accepted, share of passes", positions)
    _lines(
        stream, known, start, "feedback, records",
        {"sent": lambda f: f.sent, "dropped": lambda f: sum(f.dropped.values())},
    )  # fmt: skip
    stream.set_xlabel("minutes")
    for axes in (upper, speed, drafts, stream):
        _mark_versions(axes, reports, start, named=axes is upper)
    try:
        picture.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise AdaSpecError(f"the picture cannot be written to {path} ({error}).") from error


def _accepted(position: int) -> Any:
    return lambda f: f.acceptance[position - 1] if len(f.acceptance) >= position else None


def _lines(
    axes: "Axes",
    known: Iterable[tuple[float, Figures]],
    start: float,
    label: str,
    series: dict[str, Any],
) -> None:
    for name, value in series.items():
        points = [((t - start) / 60, v) for t, f in known if (v := value(f)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize="small")


def _mark_versions(axes: "Axes", reports: Sequence[Report], start: float, named: bool) -> None:
    changes = {(c.time, c.version): c for report in reports for c in report.timeline}
    for change in changes.values():
        minute = (change.time - start) / 60
        axes.axvline(
            minute, color="grey", linewidth=0.8, linestyle=":" if change.restarted else "--"
        )
        if named:
            axes.annotate(
                f"v{change.version}",
                (minute, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize="x-small",
                rotation=90,
                va="bottom",
            )
