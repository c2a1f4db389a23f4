"""The learner's decisions, with their reasons, where its version store can be read."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.decisions import Decision, last_decisions
from adaspec.monitor import Monitor, Report, parse, render
from adaspec.versions import GateVerdict, Interval, Pointer
from online.publisher import Decision as Written
from tests.monitor.test_monitor import LATER, Pages, rendered, text_of


def written(time: float, number: int, action: str | None, reason: str) -> bytes:
    """A line as the learner writes it."""
    nothing = Interval(estimate=0.0, low=0.0, high=0.0)
    live = Pointer(
        lineage="0" * 16, sequence=1, number=number, sha256="0" * 64, reason="for some reason"
    )
    verdict = None
    if action is not None:
        verdict = GateVerdict(
            action=action, reason=reason, incumbent_number=0, requests=9, candidate=2.0,  # type: ignore[arg-type]
            incumbent=1.5, base=1.5, over_incumbent=nothing, over_base=nothing,
            incumbent_over_base=nothing, confidence=0.9,
        )  # fmt: skip
    line = Written(time=time, steps=10, live=live, verdict=verdict, note=reason)
    return msgspec.json.encode(line) + b"\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "decisions.jsonl").write_bytes(
        written(100.0, 0, "keep", "gain +0.1% with 90% interval from -2.0%")
        + written(200.0, 1, "publish", "commits +20.0% tokens per target pass")
        + written(300.0, 0, None, "at an operator's word: rolled back to version 0")
    )
    return tmp_path


def test_what_the_learner_writes_is_read(store: Path) -> None:
    assert last_decisions(store) == [
        Decision(100.0, 0, "keep", "gain +0.1% with 90% interval from -2.0%"),
        Decision(200.0, 1, "publish", "commits +20.0% tokens per target pass"),
        Decision(300.0, 0, None, "at an operator's word: rolled back to version 0"),
    ]


def test_only_the_end_of_a_long_log_is_read(store: Path) -> None:
    with (store / "decisions.jsonl").open("ab") as file:
        for number in range(2000):
            file.write(written(400.0 + number, 0, "keep", "nothing new"))
    assert [d.time for d in last_decisions(store)] == [400.0 + n for n in range(1992, 2000)]


@pytest.mark.parametrize(
    "damage", [b'{"time": 4', b"hello\n", b"\xff\xfe\n", json.dumps({"time": "x"}).encode()]
)
def test_a_line_that_is_none_is_left_out(store: Path, damage: bytes) -> None:
    with (store / "decisions.jsonl").open("ab") as file:
        file.write(damage)
    assert len(last_decisions(store)) == 3


def test_without_a_store_there_are_none(tmp_path: Path) -> None:
    assert last_decisions(tmp_path / "nowhere") == []
    assert Monitor("u", 5.0).report(1.0).decisions == []


def test_they_are_shown(store: Path) -> None:
    monitor = Monitor("u", 5.0, store)
    monitor.see(parse(text_of(LATER), now=310.0))
    text = " ".join(rendered(monitor.report(310.0)).split())
    assert "publish commits +20.0% tokens per target pass; version 1 live" in text
    assert "told at an operator's word: rolled back to version 0; version 0 live" in text


def test_the_command_reads_the_store_it_is_given(store: Path) -> None:
    with Pages() as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        done = CliRunner().invoke(
            app,
            ["monitor", f"http://127.0.0.1:{pages.server_port}", "--once", "--interval", "0.2",
             "--json", "--store", str(store)],
        )  # fmt: skip
        pages.shutdown()
    report = msgspec.json.decode(done.output, type=Report)
    assert [d.action for d in report.decisions] == ["keep", "publish", None]
    assert render(report)
