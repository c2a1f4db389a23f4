"""What a kind of fault cost the traffic: reported by the fault tests, shown in a table."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

REPORT_VARIABLE = "ADASPEC_FAULT_REPORT"  # names the file of rows
ANSWERS = 10  # right answers in a row that count as recovery


class Seconds(msgspec.Struct, frozen=True):
    """Of all tries."""

    median: float
    most: float


class Row(msgspec.Struct, frozen=True):
    """One kind of fault.

    Attributes:
        tries: times that it struck.
        in_flight: requests that were waiting for their answer when it did, of all tries.
        answered: requests answered from the first try to the end of the last.
        lost, changed: those of them that got no answer, or another than the target's.
        again: requests that were sent again since their connection broke.
        answers: from the fault until `ANSWERS` more requests were answered rightly.
        version: from the fault until the server ran a version that was published after it; None
            where nothing was.
    """

    fault: str
    tries: int
    in_flight: int
    answered: int
    lost: int
    changed: int
    again: int
    answers: Seconds | None
    version: Seconds | None


def read_rows(path: Path) -> list[Row]:
    """What was reported, in its order."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [
        "| fault | times | in flight | answered | lost | changed | sent again "
        f"| {ANSWERS} right answers after, s | a newer version served after, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        counts = (r.tries, r.in_flight, r.answered, r.lost, r.changed, r.again)
        cells = [r.fault, *map(str, counts), _span(r.answers), _span(r.version)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _span(seconds: Seconds | None) -> str:
    return "" if seconds is None else f"{seconds.median:.1f} (worst {seconds.most:.1f})"
