"""The monitor: figures from two readings, restarts, old figures, and the command."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.errors import AdaSpecError
from adaspec.monitor import Monitor, Report, Scrape, draw, figures, parse, read_log, render

Samples = Mapping[str, float]


def text_of(samples: Samples) -> str:
    """Prometheus's text format; keys are names with their labels."""
    return "".join(f"{name} {value}\n" for name, value in samples.items())


def counted(version: int, passes: int, committed: int, length: int = 8) -> dict[str, float]:
    return {
        f'adaspec_target_passes_total{{version="{version}",verify_length="{length}"}}': passes,
        f'adaspec_committed_tokens_total{{version="{version}"}}': committed,
        f'adaspec_accepted_tokens_total{{version="{version}",position="1"}}': passes * 0.5,
        f'adaspec_accepted_tokens_total{{version="{version}",position="2"}}': passes * 0.25,
    }


EARLIER = {
    "adaspec_live_version": 2,
    **counted(0, 1000, 2000),
    **counted(2, 1000, 3000),
    'adaspec_feedback_records_total{outcome="sent"}': 90,
    'adaspec_feedback_records_total{outcome="budget"}': 0,
    "adaspec_feedback_bytes_total": 1e6,
}
LATER = {
    **EARLIER,
    **counted(2, 1100, 3350),
    **counted(2, 300, 900, length=4),
    'adaspec_committed_tokens_total{version="2"}': 4200,
    'adaspec_feedback_records_total{outcome="sent"}': 100,
    'adaspec_feedback_records_total{outcome="budget"}': 50,
    "adaspec_feedback_bytes_total": 3e6,
    'adaspec_cost_seconds{kind="plain",batch="1",width="1"}': 0.01,
    'adaspec_cost_seconds{kind="plain",batch="4",width="1"}': 0.02,
    'adaspec_gain_over_base{version="2"}': 0.5,
    'adaspec_gain_over_base_error{version="2"}': 0.05,
    'adaspec_learner{quantity="steps"}': 40,
    'adaspec_gate_verdicts_total{action="publish"}': 2,
    'sglang:num_running_reqs{model_name="m"}': 3,
    "something_else": 1,
}


def test_figures_of_the_moment_are_of_the_live_version() -> None:
    found = figures(parse(text_of(LATER), now=110.0), parse(text_of(EARLIER), now=100.0))
    assert found.live_version == 2
    assert found.seconds == 10.0
    assert found.committed_per_pass == pytest.approx(1200 / 400)  # 1100 + 300 - 1000 passes
    assert found.tokens_per_s == pytest.approx(120.0)
    assert found.base == pytest.approx(2.0)
    assert found.best is not None
    assert found.best.version == 2
    assert found.best.gain == 0.5
    assert found.verify_lengths == {8: pytest.approx(0.25), 4: pytest.approx(0.75)}
    assert found.sent_bytes_per_s == pytest.approx(2e5)
    assert found.dropped == {"budget": 50}
    assert found.running == 3
    assert found.plain_tokens_per_s == pytest.approx(3 / 0.02)
    assert found.learner == {"steps": 40}
    assert found.verdicts == {"publish": 2}


def test_one_reading_gives_totals() -> None:
    found = figures(parse(text_of(EARLIER), now=100.0))
    assert found.seconds is None
    assert found.tokens_per_s is None
    assert found.committed_per_pass == pytest.approx(5000 / 2000)
    assert found.acceptance == [pytest.approx(0.5), pytest.approx(0.25)]


def test_a_server_without_passes_divides_by_nothing() -> None:
    found = figures(parse("adaspec_live_version 0\n", now=1.0))
    assert found.committed_per_pass is None
    assert found.acceptance == []
    assert found.best is None
    rendered(Monitor("u", 30.0).report(1.0))


def test_old_figures_are_called_old_and_a_restart_is_noticed() -> None:
    monitor = Monitor("http://server", window_s=30.0)
    assert monitor.report(1.0).figures is None
    monitor.see(parse(text_of(EARLIER), now=100.0))
    monitor.see(parse(text_of(LATER), now=102.0))
    monitor.miss("nothing answers")
    report = monitor.report(150.0)
    assert report.stale_s == 48.0
    assert report.figures is not None
    assert "48 s old: nothing answers" in rendered(report)
    again = {**EARLIER, **counted(2, 5, 10), "adaspec_live_version": 0}
    monitor.see(parse(text_of(again), now=200.0))
    report = monitor.report(201.0)
    assert report.problem is None
    assert report.stale_s == 0.0
    assert [(c.version, c.restarted) for c in report.timeline] == [(2, False), (0, True)]
    assert report.figures is not None
    assert report.figures.seconds is None  # nothing before the restart counts


def test_the_window_keeps_what_it_needs() -> None:
    monitor = Monitor("u", window_s=10.0)
    for second in range(100):
        monitor.see(Scrape(float(second), parse(text_of(EARLIER)).samples))
    known = monitor.report(99.0).figures
    assert known is not None
    assert known.seconds == 10.0


def test_warnings_say_what_to_do() -> None:
    monitor = Monitor("u", 30.0)
    monitor.see(parse(text_of(EARLIER), now=100.0))
    slow = {
        **LATER,
        "adaspec_audit_failures_total": 1,
        "adaspec_refused_versions_total": 2,
        'adaspec_committed_tokens_total{version="2"}': 3100,
    }
    monitor.see(parse(text_of(slow), now=110.0))
    text = " ".join(monitor.report(110.0).warnings)
    for word in ("restart the server", "2 drafter versions", "tap.bytes_per_second", "roll back"):
        assert word in text
    assert 'verify.policy to "goodput"' in text


@pytest.mark.parametrize("text", ["<html>", 'adaspec_x{version="1" 3\n', "adaspec_x abc\n"])
def test_what_is_no_metrics_page_is_refused(text: str) -> None:
    with pytest.raises(AdaSpecError, match="text format"):
        parse(text)


def test_every_metric_that_is_read_is_documented() -> None:
    root = Path(__file__).parents[2]
    documented = (root / "docs" / "metrics.md").read_text()
    sources = (root / "adaspec" / "monitor").glob("*.py")
    names = {n for path in sources for n in re.findall(r'"(adaspec_[a-z_]+)"', path.read_text())}
    assert len(names) > 10
    for name in names - {"adaspec_"}:
        assert f"`{name.removesuffix('_total')}`" in documented


def rendered(report: Report) -> str:
    console = Console(width=100, record=True, file=None)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"paused": 0, "pinned": -1}, "spent on learning\n"),
        ({"paused": 1, "pinned": 0}, "spent on learning, paused, version 0 pinned"),
        ({"paused": 0, "resting": 1, "pinned": -1}, "spent on learning, resting\n"),
    ],
)
def test_what_an_operator_holds_is_shown(held: dict[str, int], says: str) -> None:
    monitor = Monitor("http://server", 30.0)
    learner = {f'adaspec_learner{{quantity="{name}"}}': value for name, value in held.items()}
    monitor.see(parse(text_of(LATER | learner), now=110.0))
    assert says in rendered(monitor.report(110.0))


def test_everything_fits_a_narrow_terminal() -> None:
    monitor = Monitor("http://server", 30.0)
    monitor.see(parse(text_of(EARLIER), now=100.0))
    monitor.see(parse(text_of(LATER), now=110.0))
    text = rendered(monitor.report(110.0))
    for word in ("now 3.00", "base 2.00", "best 3.00 (version 2)", "+50.0% ± 5.0%", "40 steps"):
        assert word in text


class Pages(ThreadingHTTPServer):
    """Answers everything with one page."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.text = 200, text_of(LATER)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = self.server
        assert isinstance(pages, Pages)
        self.send_response(pages.status)
        self.end_headers()
        self.wfile.write(pages.text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[Pages]:
    with Pages() as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def run(pages: Pages, *options: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{pages.server_port}"
    result = CliRunner().invoke(app, ["monitor", url, "--once", "--interval", "0.2", *options])
    return result.exit_code, result.output


def test_once_prints_a_report_and_logs_it(pages: Pages, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    code, output = run(pages, "--json", "--log", str(log))
    assert code == 0
    report = msgspec.json.decode(output, type=Report)
    assert report.figures is not None
    assert report.figures.live_version == 2
    assert abs(report.time - time.time()) < 60
    assert msgspec.json.decode(log.read_bytes(), type=Report) == report
    code, output = run(pages)
    assert code == 0
    assert "version 2 is live" in output


def test_a_log_becomes_a_picture(tmp_path: Path) -> None:
    monitor, log = Monitor("u", 5.0), tmp_path / "run.jsonl"
    with log.open("wb") as file:
        for second in range(0, 60, 2):
            passes = 1000 + 10 * second
            version = 2 if second < 30 else 3
            samples = {
                **LATER,
                **counted(version, passes, 3 * passes),
                "adaspec_live_version": version,
            }
            monitor.see(parse(text_of(samples), now=100.0 + second))
            file.write(msgspec.json.encode(monitor.report(100.0 + second)) + b"\n")
        file.write(b'{"time": 3')  # a line that is being written
    picture = tmp_path / "run.png"
    result = CliRunner().invoke(app, ["monitor", "--plot", str(picture), "--log", str(log)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(read_log(log)) == 30


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="cannot be read"):
        read_log(tmp_path / "none")
    (tmp_path / "other").write_text("hello\nworld\n")
    with pytest.raises(AdaSpecError, match="line 1"):
        read_log(tmp_path / "other")
    with pytest.raises(AdaSpecError, match="no report"):
        draw([], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (404, "", "--enable-metrics"),
        (500, "", "status 500"),
        (200, "process_cpu_seconds_total 3\n", "none of AdaSpec's yet"),
        (200, "<html>", "text format"),
    ],
)
def test_a_server_without_our_metrics_is_told_apart(
    pages: Pages, status: int, text: str, words: str
) -> None:
    pages.status, pages.text = status, text
    code, output = run(pages)
    assert code == 1
    assert words in " ".join(output.split()).replace("│ ", "").replace(" │", "")


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["monitor", "http://127.0.0.1:9", "--once"])
    assert result.exit_code == 1
    assert "nothing answers" in result.output
    result = CliRunner().invoke(app, ["monitor", "--once", "--log", str(tmp_path)])
    assert result.exit_code != 0
