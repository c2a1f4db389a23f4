"""The monitor's page: what it serves, to whom, and what a browser makes of it."""

import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn
from starlette.testclient import TestClient
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.errors import AdaSpecError
from adaspec.hosts import is_loopback
from adaspec.monitor import Monitor, parse
from adaspec.monitor.history import History, Point, point
from adaspec.monitor.web import Watcher, application, listen
from tests.monitor.test_monitor import EARLIER, LATER, Pages, counted, text_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Server:
    """A server whose counters rise; version 3 goes live at the tenth reading."""

    def __init__(self) -> None:
        self.readings = 0
        self.is_away = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise httpx.ConnectError("refused", request=request)
        self.readings += 1
        live = 2 if self.readings < 10 else 3
        passes = 1000 + 100 * self.readings
        samples = {**LATER, **counted(live, passes, 3 * passes), "adaspec_live_version": live}
        return httpx.Response(200, text=text_of(samples))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(server: Server) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(server))


@pytest.fixture
def watcher() -> Watcher:
    return Watcher(Monitor("http://server:30000", 30.0), "http://server:30000", 1.0, lambda _: None)


def asked(watcher: Watcher, host: str = "127.0.0.1") -> TestClient:
    return TestClient(application(watcher, host), base_url=f"http://{host}")


def test_what_is_long_past_is_kept_coarsely() -> None:
    history = History(most=64)
    for second in range(1000):
        history.add(Point(time=float(second)))
    times = [p.time for p in history.after(-1)]
    assert len(times) <= 64
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-32:] == list(range(968, 1000))
    assert [p.time for p in history.after(997.0)] == [998, 999]


def test_a_report_becomes_a_point_and_silence_a_gap() -> None:
    monitor = Monitor("u", 30.0)
    assert point(monitor.report(5.0)) == Point(time=5.0)
    monitor.see(parse(text_of(EARLIER), now=100.0))
    monitor.see(parse(text_of(LATER), now=110.0))
    seen = point(monitor.report(110.0))
    assert seen.version == 2
    assert seen.committed_per_pass == pytest.approx(3.0)
    assert seen.verify_length == pytest.approx((100 * 8 + 300 * 4) / 400)
    assert (seen.sent, seen.dropped) == (100, 50)
    monitor.miss("nobody there")
    assert point(monitor.report(112.0)) == Point(time=112.0)


def test_only_what_is_new_is_sent_again(watcher: Watcher, client: httpx.Client) -> None:
    for _ in range(3):
        watcher.look(client)
    first = asked(watcher).get("/data").json()
    assert len(first["points"]) == 3
    assert first["report"]["figures"]["live_version"] == 2
    watcher.look(client)
    last = first["points"][-1]["time"]
    again = asked(watcher).get("/data", params={"after": last}).json()
    assert len(again["points"]) == 1
    assert again["points"][0]["time"] > last


def test_a_server_that_is_away_is_told_of(
    watcher: Watcher, client: httpx.Client, server: Server
) -> None:
    watcher.look(client)
    server.is_away = True
    watcher.look(client)
    state = asked(watcher).get("/data").json()
    assert "nothing answers" in state["report"]["problem"]
    assert state["report"]["figures"] is not None
    assert state["points"][-1]["committed_per_pass"] is None


def test_the_page_is_of_files_that_are_there(watcher: Watcher) -> None:
    browser = asked(watcher)
    page = browser.get("/")
    assert page.status_code == 200
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(named) == 4
    for name in named:
        assert browser.get(f"/{name}").status_code == 200, name
    assert "http" not in page.text  # nothing is loaded from elsewhere
    assert "default-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("after", ["never", "nan,", "1e"])
def test_a_bad_time_is_refused_in_a_sentence(watcher: Watcher, after: str) -> None:
    reply = asked(watcher).get("/data", params={"after": after})
    assert reply.status_code == 400
    assert "Unix time" in reply.text


@pytest.mark.parametrize("path", ["/page/../web.py", "/page/%2e%2e/web.py", "/metrics", "/page/"])
def test_nothing_else_is_served(watcher: Watcher, path: str) -> None:
    assert asked(watcher).get(path).status_code == 404


def test_on_loopback_other_names_are_not_answered_to(watcher: Watcher) -> None:
    local = asked(watcher)
    assert local.get("/data", headers={"host": "evil.example"}).status_code == 400
    assert local.get("/data", headers={"host": "localhost:30090"}).status_code == 200
    public = asked(watcher, "0.0.0.0")
    assert public.get("/data", headers={"host": "gpu-7.example"}).status_code == 200
    assert [is_loopback(h) for h in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "gpu-7")] == [
        True, True, True, False, False
    ]  # fmt: skip


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["monitor", "--web", "--port", str(port)])
    assert isinstance(result.exception, AdaSpecError)
    assert "choose another with --host and --port" in str(result.exception)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with Pages() as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}"
        command = [sys.executable, "-m", "adaspec.cli.main", "monitor", url, "--web"]
        options = ["--port", "0", "--interval", "0.2", "--log", str(log)]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            try:
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    state = httpx.get(f"{address}data").json()
                    if len(state["points"]) > 2:
                        break
                    time.sleep(0.1)
                assert state["report"]["figures"]["live_version"] == 2
            finally:
                process.send_signal(2)
            assert process.wait(timeout=20) == 0
        pages.shutdown()
    assert len(log.read_bytes().splitlines()) > 2


@pytest.fixture
def address(watcher: Watcher, client: httpx.Client) -> Iterator[str]:
    """A page of twenty readings, served for real."""
    for _ in range(20):
        watcher.look(client)
        time.sleep(0.01)
    with listen("127.0.0.1", 0) as listener:
        served = uvicorn.Server(
            uvicorn.Config(application(watcher, "127.0.0.1"), log_level="warning", lifespan="off")
        )
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        served.should_exit = True
        thread.join()


def browse(address: str, *options: str) -> str:
    """Standard output of headless Chromium, after the page has had time to read and draw."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000")
    done = subprocess.run(
        [CHROMIUM, *flags, *options, address],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_figures_plots_and_versions(
    address: str, width: int, tmp_path: Path
) -> None:
    page = browse(address, f"--window-size={width},1400", "--dump-dom")
    text = re.sub(r"<[^>]+>", " ", page)
    for words in ("Version 3 is live", "3.00", "committed tokens per pass", "version 2", "publish"):
        assert words in text, words
    assert "does not answer" not in text
    assert page.count("<canvas") == 6
    widths = [int(w) for w in re.findall(r'<canvas width="(\d+)"', page)]
    assert all(200 < w < max(width, 500) for w in widths), widths  # Chromium's least is 500
    shot = tmp_path / "page.png"
    browse(address, f"--window-size={width},1400", f"--screenshot={shot}")
    assert shot.read_bytes()[:4] == b"\x89PNG"


def test_points_are_small(watcher: Watcher, client: httpx.Client) -> None:
    """A day's worth must not weigh down a phone."""
    for _ in range(50):
        watcher.look(client)
    state = msgspec.json.decode(watcher.seen(0.0))
    assert len(msgspec.json.encode(state["points"])) < 50 * 400
