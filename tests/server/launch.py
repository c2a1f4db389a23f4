"""Start a real SGLang server on a free port, and stop it with everything it started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_STOP_GRACE_S = 15.0


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Base address, without a trailing slash.
        log_path: File with stdout and stderr of the whole process group.
        process: The launcher; its id is the process group's.
    """

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def post(self, path: str, timeout: float = 120.0, **body: Any) -> Any:
        """JSON answer of a POST; raises ``httpx.HTTPStatusError`` on an error status."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=timeout)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """JSON answer of a GET; raises ``httpx.HTTPStatusError`` on an error status."""
        answer = httpx.get(f"{self.url}{path}", timeout=timeout)
        answer.raise_for_status()
        return answer.json()

    def generate(self, **body: Any) -> Any:
        """Answer of SGLang's native ``/generate``."""
        return self.post("/generate", **body)

    def flush_cache(self) -> None:
        """Drop the prefix cache; the server must be idle."""
        httpx.post(f"{self.url}/flush_cache", timeout=30.0).raise_for_status()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    model: Path | str,
    *arguments: str,
    log_path: Path,
    env: Mapping[str, str | None] | None = None,
    ready_timeout: float = 240.0,
) -> Iterator[Server]:
    """Run ``python -m sglang.launch_server`` until the block ends.

    Args:
        model: Model directory.
        arguments: Further command line arguments.
        log_path: Where the output goes; kept.
        env: Variables to set, or to remove where the value is None.
        ready_timeout: Seconds to wait for the server to answer.

    Raises:
        RuntimeError: the server ended or did not answer in time; the message ends with its log.
    """
    port = free_port()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            launch_command(model, port, *arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(env or {}),
            start_new_session=True,  # its own process group, so that stop() reaches every child
        )
    server = Server(f"http://127.0.0.1:{port}", log_path, process)
    try:
        _wait_until_ready(server, ready_timeout)
        yield server
    finally:
        stop(process)


def launch_command(model: Path | str, port: int, *arguments: str) -> list[str]:
    """Command line of a server on ``port``."""
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), *arguments),
    ]


def run_until_exit(
    model: Path | str,
    *arguments: str,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 180.0,
) -> tuple[int, str]:
    """(exit code, output) of a server that is expected to refuse to start."""
    process = subprocess.Popen(
        launch_command(model, free_port(), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(env or {}),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        stop(process)
    return process.returncode, output.decode(errors="replace")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: its launcher politely, then the whole process group for good."""
    for send, sign in ((os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)):
        try:
            send(process.pid, sign)
        except ProcessLookupError:
            break
        if _group_gone(process, _STOP_GRACE_S):
            break
    process.wait(timeout=_STOP_GRACE_S)


def sse_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Decoded ``data:`` records of a server-sent event stream, up to ``[DONE]``."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _wait_until_ready(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(
                f"The server ended with code {server.process.returncode}:\n{server.log()[-6000:]}"
            )
        try:
            # Unlike /health, this passes a request through the scheduler.
            if httpx.get(f"{server.url}/health_generate", timeout=30.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"The server did not answer in {timeout:.0f} s:\n{server.log()[-6000:]}")


def _group_gone(process: subprocess.Popen[bytes], grace: float) -> bool:
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        process.poll()  # reaps the launcher, whose zombie would keep the group alive
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
