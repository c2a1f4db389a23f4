"""Runs every fault test against real servers, and writes down what the faults have cost.

    python -m benchmarks.faults --out faults.json --page docs/faults.md

Tests are named to run only some of their files; the results of the others stay in the report as
they are. Exits with 1 if a test failed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from os import environ
from pathlib import Path

import msgspec

from adaspec.load.machine import machine_facts
from benchmarks.faults.rows import REPORT_VARIABLE, Row, read_rows, table

TESTS = (
    "tests/server/test_online_faults.py",
    "tests/server/test_faults_of_processes.py",
    "tests/server/test_faults_of_files.py",
    "tests/server/test_faults_during_swaps.py",
    "tests/server/test_faults_of_restarts.py",
)
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"


class Run(msgspec.Struct, frozen=True):
    """Of one file of tests."""

    machine: dict[str, object]
    seconds: float
    passed: bool
    rows: list[Row]


class Report(msgspec.Struct, frozen=True):
    """The newest run of each file."""

    runs: dict[str, Run]

    def rows(self) -> list[Row]:
        """Of all runs, in the order of `TESTS`."""
        return [row for name in TESTS if name in self.runs for row in self.runs[name].rows]


def read_report(path: Path) -> Report:
    """A report that `main` has written, or an empty one."""
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report({})


def run(name: str) -> Run:
    """Run the tests of a file."""
    with tempfile.TemporaryDirectory() as scratch:
        rows, begun = Path(scratch) / "rows", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "thorough", "--durations=0", name]
        done = subprocess.run(command, env=environ | {REPORT_VARIABLE: str(rows)})
        seconds = round(time.monotonic() - begun, 1)
        machine = machine_facts() | {"command": ["python", *command[1:]]}
        return Run(machine, seconds, done.returncode == 0, read_rows(rows))


def with_table(page: str, rows: list[Row]) -> str:
    """A page with these rows between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(rows)}\n{END}{after}"


def main() -> None:
    """Run, write, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", metavar="TESTS", help=", ".join(TESTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="of documentation; its table is renewed")
    options = parser.parse_args()
    if unknown := set(options.tests) - set(TESTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(TESTS)}")
    runs = read_report(options.out).runs
    for name in options.tests or TESTS:
        runs[name] = run(name)
        report = Report(runs)
        document = msgspec.json.format(msgspec.json.encode(report), indent=1)
        options.out.write_bytes(document + b"\n")
        if options.page is not None:
            options.page.write_text(with_table(options.page.read_text(), report.rows()))
    print(table(Report(runs).rows()))
    if failed := [name for name in options.tests or TESTS if not runs[name].passed]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
