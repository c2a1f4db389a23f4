"""What faults cost the traffic, in numbers: one row for each kind of fault.

Rows go to the file that an environment variable names, as lines of JSON; `benchmarks.faults` sets
the variable and reads the file.
"""

import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.faults.rows import ANSWERS, REPORT_VARIABLE, Row, Seconds
from tests.server.checked_traffic import CheckedTraffic


class Fault:
    """Counts the tries of one kind of fault; see `fault`."""

    def __init__(self, name: str, traffic: CheckedTraffic) -> None:
        self._name = name
        self._traffic = traffic
        self._begun = self._totals()
        self._struck_at = 0.0
        self._in_flight: list[int] = []
        self._answers: list[float] = []
        self._version: list[float] = []

    def await_moment(self, draw: random.Random, within: float = 0.3) -> None:
        """Return at a random moment with requests in flight."""
        time.sleep(draw.uniform(0.0, within))
        deadline = time.monotonic() + 60
        while not self._traffic.in_flight:
            assert time.monotonic() < deadline, "no request came"
            time.sleep(0.001)

    def strikes(self) -> None:
        """Call it just before the fault is made, or just after it has come about."""
        self._struck_at = time.monotonic()
        self._in_flight.append(self._traffic.in_flight)

    def answers(self) -> None:
        """Wait for the next right answers."""
        self._traffic.wait(ANSWERS)
        self._answers.append(time.monotonic() - self._struck_at)

    def version_served(self) -> None:
        """The server runs a version that was published after the fault."""
        self._version.append(time.monotonic() - self._struck_at)

    def row(self) -> Row:
        """What there is to report."""
        answered, lost, changed, again = (
            now - then for now, then in zip(self._totals(), self._begun, strict=True)
        )
        return Row(
            self._name,
            len(self._in_flight),
            sum(self._in_flight),
            answered,
            lost,
            changed,
            again,
            _of_all(self._answers),
            _of_all(self._version),
        )

    def _totals(self) -> tuple[int, int, int, int]:
        traffic = self._traffic
        return traffic.served, traffic.lost, traffic.changed, traffic.again


@contextmanager
def fault(name: str, traffic: CheckedTraffic) -> Iterator[Fault]:
    """Report a fault; an assertion fails if it has cost a request or changed an output."""
    struck = Fault(name, traffic)
    yield struck
    row = struck.row()
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        with Path(path).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    assert row.tries > 0
    assert row.lost == row.changed == 0, traffic.failures


def _of_all(seconds: list[float]) -> Seconds | None:
    if not seconds:
        return None
    return Seconds(round(statistics.median(seconds), 2), round(max(seconds), 2))
