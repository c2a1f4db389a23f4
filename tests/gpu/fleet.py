"""Servers that start side by side: a cold start is mostly compiling, on one CPU core each."""

import contextlib
import time
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.load.launch import ServerProcess, start_server
from tests.gpu.servers import Launch
from tests.server.instrumented import command
from tests.server.launch import Server

START_TIMEOUT_S = 420.0


class Fleet:
    """Starts servers at once and waits for them when they are needed.

    Args:
        logs: directory of their logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, ServerProcess] = {}
        self._deadlines: dict[str, float] = {}
        self._waiting: dict[str, Launch] = {}

    def start(self, name: str, launch: Launch) -> None:
        """Start a server now; if it takes all memory, as soon as the others are up.

        SGLang sizes a KV pool by the memory that is free before and after the weights are loaded,
        so such a server must not start beside others that do the same sum.
        """
        if launch.alone:
            self._waiting[name] = launch
            return
        self._deadlines[name] = time.monotonic() + START_TIMEOUT_S
        self._running[name] = start_server(
            launch.spec,
            log=self._logs / f"{name}.log",
            command=None if launch.module is None else command(launch.spec, launch.module),
        )

    def server(self, name: str) -> Server:
        """The server, once it answers.

        Raises:
            AdaSpecError: if it ended or does not answer in time.
        """
        while self._waiting:
            for other in self._running:
                with contextlib.suppress(AdaSpecError):  # told to the tests that need it
                    self._wait(other)
            alone, launch = self._waiting.popitem()
            self.start(alone, launch._replace(alone=False))
        self._wait(name)
        return Server(self._running[name].url, self._logs / f"{name}.log")

    def close(self) -> None:
        """Stop all servers."""
        for process in self._running.values():
            process.process.terminate()
        for process in self._running.values():
            process.stop()

    def _wait(self, name: str) -> None:
        self._running[name].wait_until_healthy(max(1.0, self._deadlines[name] - time.monotonic()))
