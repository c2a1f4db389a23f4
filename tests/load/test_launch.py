"""The launcher, against a stand-in server: health, errors that explain, and nothing left behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from adaspec.errors import AdaSpecError
from adaspec.load.launch import (
    ServerProcess,
    ServerSpec,
    check_port_is_free,
    free_port,
    start_server,
)

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


def start_fake(tmp_path: Path, *behaviour: str, own_group: bool = True) -> ServerProcess:
    spec = ServerSpec(target="fake", port=free_port())
    command = [sys.executable, str(FAKE_SERVER), str(spec.port), *behaviour]
    return start_server(spec, log=tmp_path / "log", own_group=own_group, command=command)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_command_is_the_stock_one() -> None:
    spec = ServerSpec(
        target="T", port=1234, drafter="D", dtype="float32", extra=("--max-running-requests", "8")
    )
    assert " ".join(spec.command()[1:]) == (
        "-m sglang.launch_server --model-path T --host 127.0.0.1 --port 1234 --dtype float32 "
        "--speculative-algorithm ADASPEC --speculative-draft-model-path D "
        "--max-running-requests 8"
    )


def test_without_drafter_there_is_no_speculation() -> None:
    assert not any("speculative" in word for word in ServerSpec(target="T", port=1).command())


def test_configuration_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASPEC_CONFIG", "/stale.toml")
    chosen = ServerSpec(target="T", port=1, config=Path("mine.toml")).full_environment()
    assert chosen["ADASPEC_CONFIG"] == "mine.toml"
    assert "ADASPEC_CONFIG" not in ServerSpec(target="T", port=1).full_environment()


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("box", "http://box:80")],
)
def test_url_is_one_a_local_client_can_use(host: str, url: str) -> None:
    assert ServerSpec(target="T", host=host, port=80).url == url


def test_waits_until_healthy_and_then_answers(tmp_path: Path) -> None:
    with start_fake(tmp_path) as server:
        server.wait_until_healthy(30)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.last_log_line() == "ready"
    assert server.process.returncode is not None


@pytest.mark.parametrize("own_group", [True, False])
def test_stop_leaves_no_process_behind(tmp_path: Path, own_group: bool) -> None:
    with start_fake(tmp_path, "--with-child", own_group=own_group) as server:
        server.wait_until_healthy(30)
        child = psutil.Process(int(server.log_tail().split()[1]))
    assert is_gone(child)
    assert server.process.returncode != 0


@pytest.mark.parametrize("own_group", [True, False])
def test_orphans_die_even_if_the_server_went_first(tmp_path: Path, own_group: bool) -> None:
    with start_fake(tmp_path, "--with-child", own_group=own_group) as server:
        server.wait_until_healthy(30)
        child = psutil.Process(int(server.log_tail().split()[1]))
        server.process.kill()
        server.process.wait()
    assert is_gone(child)


def test_a_server_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    spec = ServerSpec(target="fake", port=free_port())
    launcher = f"""
import sys, time
from adaspec.load.launch import ServerSpec, start_server
spec = ServerSpec(target="fake", port={spec.port})
command = [sys.executable, {str(FAKE_SERVER)!r}, "{spec.port}"]
server = start_server(spec, command=command)
server.wait_until_healthy(30)
print("pid", server.process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
    server = psutil.Process(pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while not is_gone(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(server)


def test_the_servers_own_refusal_is_passed_on(tmp_path: Path) -> None:
    with (
        start_fake(tmp_path, "--refuse") as server,
        pytest.raises(AdaSpecError, match=r"^the drafter does not fit\.$"),
    ):
        server.wait_until_healthy(30)


def test_a_crash_names_the_exit_code_and_the_log(tmp_path: Path) -> None:
    with (
        start_fake(tmp_path, "--crash") as server,
        pytest.raises(AdaSpecError, match=r"code 3 .*log.*out of luck"),
    ):
        server.wait_until_healthy(30)


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(AdaSpecError, match=f"127.0.0.1:{port}.*--port"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", free_port())


def test_own_group_is_not_the_callers(tmp_path: Path) -> None:
    with start_fake(tmp_path) as server:
        assert os.getpgid(server.process.pid) != os.getpgrp()
