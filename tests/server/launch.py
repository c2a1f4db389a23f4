"""What the server tests ask of a server, on top of `adaspec.load.launch`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from adaspec.load.launch import ServerSpec, free_port, running_server, start_server


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Base address, without a trailing slash.
        log_path: File with stdout and stderr of every process of the server.
    """

    url: str
    log_path: Path

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
        """Drop the prefix cache, once the server is idle."""
        wait = {"timeout": 20}
        httpx.post(f"{self.url}/flush_cache", params=wait, timeout=30.0).raise_for_status()


@contextmanager
def serve(
    model: Path | str, *arguments: str, log_path: Path, config: Path | None = None
) -> Iterator[Server]:
    """Run ``python -m sglang.launch_server`` until the block ends.

    Args:
        model: Model directory.
        arguments: Further command line arguments.
        log_path: Where the output goes; kept.
        config: AdaSpec configuration file.

    Raises:
        AdaSpecError: the server ended or did not answer in time.
    """
    spec = ServerSpec(target=str(model), port=free_port(), config=config, extra=arguments)
    with running_server(spec, log=log_path, timeout_s=300.0) as process:
        yield Server(process.url, log_path)


def run_until_exit(
    model: Path | str,
    *arguments: str,
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> tuple[int, str]:
    """(exit code, output) of a server that is expected to refuse to start."""
    spec = ServerSpec(
        target=str(model), port=free_port(), config=config, extra=arguments, environment=env
    )
    with TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with start_server(spec, log=log) as server:
            code = server.process.wait(timeout)
        return code, log.read_text(errors="replace")


def sse_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Decoded ``data:`` records of a server-sent event stream, up to ``[DONE]``."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
