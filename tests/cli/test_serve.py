"""`adaspec serve` around a stand-in server: choices, sentences, exit codes and signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from adaspec.cli import serve_plan
from adaspec.cli.serve_plan import ServeOptions, plan_server
from adaspec.errors import AdaSpecError
from adaspec.load.launch import free_port

FAKE_SERVER = Path(__file__).parents[1] / "load" / "fake_server.py"

# Runs the real command with only SGLang itself replaced by the stand-in.
DRIVER = f"""
import sys
from adaspec.cli.main import app
from adaspec.load.launch import ServerSpec
server = {str(FAKE_SERVER)!r}
ServerSpec.command = lambda self: [sys.executable, server, str(self.port), *self.extra]
app()
"""


def options(**changes: object) -> ServeOptions:
    values: dict[str, object] = {
        "target": None, "drafter": None, "plain": False, "online": False, "learn_config": None,
        "config": None, "dtype": None,
        "host": "127.0.0.1", "port": 1, "extra": (),
    }  # fmt: skip
    return ServeOptions(**(values | changes))


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "ADASPEC_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture
def target(tmp_path: Path) -> str:
    directory = tmp_path / "target"
    directory.mkdir()
    return str(directory)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was not printed:\n{seen}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_answers_and_stops_when_asked(
    tmp_path: Path, target: str, number: signal.Signals
) -> None:
    port = free_port()
    process = start(
        tmp_path, "--plain", "--target", target, "--port", str(port), "--say", "Why?", "--",
        "--with-child",
    )  # fmt: skip
    try:
        said = read_until(process, "Ctrl-C stops")
        server = psutil.Process(process.pid).children()[0]
        child = server.children()[0]
        assert os.getpgid(server.pid) == os.getpgid(process.pid)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said + rest
    assert f"Target: {target}" in said
    assert "plain decoding" in said
    assert "Device: CPU" in said
    assert f"Log: {tmp_path}/logs/serve-{port}.log" in said
    assert re.search(rf"Ready after \d+ s on http://127.0.0.1:{port}", said)
    assert "> Why?\nThe sky is blue.\n(8 tokens in" in said
    assert "2.00 committed tokens per pass of the target" in said
    assert not server.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        ("--refuse", 2, r"^adaspec: the drafter does not fit\.$"),
        ("--crash", 2, r"^adaspec: the server exited with code 3 before it answered; see .*luck"),
    ],
)
def test_a_server_that_does_not_start_is_one_line(
    tmp_path: Path, target: str, behaviour: str, code: int, message: str
) -> None:
    process = start(
        tmp_path, "--plain", "--target", target, "--port", str(free_port()), "--", behaviour
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert re.search(message, output, re.MULTILINE), output
    assert "Traceback" not in output


def test_a_server_that_dies_later_hands_on_its_code(tmp_path: Path, target: str) -> None:
    process = start(tmp_path, "--plain", "--target", target, "--port", str(free_port()))
    read_until(process, "Ctrl-C stops")
    psutil.Process(process.pid).children()[0].kill()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL


def test_stopped_while_it_starts(tmp_path: Path, target: str) -> None:
    log = tmp_path / "log"
    process = start(
        tmp_path, "--plain", "--target", target, "--port", str(free_port()), "--log", str(log),
        "--", "--never-ready",
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (log.exists() and "loading" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "Ready" not in output


def test_log_to_the_terminal(tmp_path: Path, target: str) -> None:
    process = start(
        tmp_path, "--plain", "--target", target, "--port", str(free_port()), "--log", "-"
    )
    read_until(process, "Log: this terminal")
    read_until(process, "ready")
    process.terminate()
    process.communicate(timeout=30)


def test_a_taken_port_is_refused_before_anything_else(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        process = start(tmp_path, "--port", str(holder.getsockname()[1]))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--port" in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plain": True, "drafter": Path("D")}, "--plain serves without speculation"),
        ({"plain": True, "config": Path("C")}, "--plain serves without speculation"),
        ({"plain": True, "online": True}, "nothing to learn"),
        ({"learn_config": Path("L")}, "add --online"),
        ({"target": "/nowhere", "plain": True}, "/nowhere does not exist"),
        ({"target": "other/model"}, "bundled drafter is SmolLM2's"),
        ({"extra": ("--port", "1")}, "--port is set by adaspec serve"),
        ({"extra": ("--model-path=x",)}, "use its option --target"),
        ({"extra": ("surprise",)}, "unexpected argument 'surprise'"),
        ({"config": Path("/nowhere.toml")}, "cannot read the AdaSpec configuration /nowhere.toml"),
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AdaSpecError, match=message):
        plan_server(options(**changes), progress=lambda line: None)


def test_an_invalid_configuration_is_refused_before_the_start(tmp_path: Path, target: str) -> None:
    config = tmp_path / "adaspec.toml"
    config.write_text("[verify]\nlenght = 4\n")
    with pytest.raises(AdaSpecError, match="lenght"):
        plan_server(
            options(config=config, target=target, drafter=Path("D")), progress=lambda line: None
        )


def test_a_drafter_that_does_not_fit_is_refused_before_the_start(
    tmp_path: Path, target: str
) -> None:
    with pytest.raises(AdaSpecError, match=str(tmp_path / "drafter")):
        plan_server(
            options(target=target, drafter=tmp_path / "drafter"), progress=lambda line: None
        )


def test_configuration_named_by_the_environment_is_served(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "adaspec.toml"
    config.write_text("[verify]\nlength = 4\n")
    monkeypatch.setenv("ADASPEC_CONFIG", str(config))
    monkeypatch.setattr(
        serve_plan, "_drafter_sentence", lambda drafter, target, config: str(config.verify.length)
    )
    plan = plan_server(options(target=target, drafter=Path("D")), progress=lambda line: None)
    assert plan.spec.config == config
    assert "4" in plan.sentences
    assert plan.spec.drafter == "D"


def test_help_loads_no_model_library() -> None:
    code = "import sys, adaspec.cli.main; print('torch' in sys.modules, 'sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
