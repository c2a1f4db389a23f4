"""The report of faults: what it shows, and that the page shows what was measured."""

from pathlib import Path

import pytest

from benchmarks.faults.__main__ import TESTS, Report, Run, read_report, with_table
from benchmarks.faults.rows import Row, Seconds, table

ROOT = Path(__file__).parents[2]
ROW = Row("clock jumps", 10, 30, 200, 0, 0, 0, Seconds(1.04, 2.0), None)
PAGE = "before\n<!-- faults -->\nold\n<!-- end of faults -->\nafter\n"


def test_a_row_shows_counts_and_times() -> None:
    assert "| clock jumps | 10 | 30 | 200 | 0 | 0 | 0 | 1.0 (worst 2.0) |  |" in table([ROW])


def test_only_the_table_of_a_page_is_renewed() -> None:
    page = with_table(PAGE, [ROW])
    assert page.startswith("before\n<!-- faults -->\n| fault |")
    assert page.endswith("|\n<!-- end of faults -->\nafter\n")
    assert "old" not in page
    assert with_table(page, [ROW]) == page


def test_rows_come_in_the_order_of_the_tests() -> None:
    second = Row("another", 1, 1, 1, 0, 0, 0, None, None)
    runs = {TESTS[1]: Run({}, 1.0, True, [second]), TESTS[0]: Run({}, 1.0, True, [ROW])}
    assert Report(runs).rows() == [ROW, second]


@pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results" / "cpu-faults.json").exists(),
    reason="the table of faults has not been made yet: docs/faults.md says so",
)
def test_the_page_shows_what_was_measured_of_every_test() -> None:
    report = read_report(ROOT / "benchmarks" / "results" / "cpu-faults.json")
    page = (ROOT / "docs" / "faults.md").read_text()
    assert with_table(page, report.rows()) == page
    assert set(report.runs) == set(TESTS)
    assert all(run.passed for run in report.runs.values())
    assert all(row.lost == row.changed == 0 for row in report.rows())


def test_every_file_of_fault_tests_is_run() -> None:
    files = {f"tests/server/{path.name}" for path in (ROOT / "tests/server").glob("test_*fault*")}
    assert files - set(TESTS) == {"tests/server/test_faults_in_brief.py"}
    assert set(TESTS) <= files
