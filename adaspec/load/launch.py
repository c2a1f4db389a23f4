"""Start a stock SGLang server as a child process, wait until it answers, and stop it for certain.

Nothing here imports SGLang: the server is `python -m sglang.launch_server` in a process of its own.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from adaspec.config import CONFIG_ENVIRONMENT_VARIABLE
from adaspec.errors import AdaSpecError

HEALTH_POLL_S = 0.25
STOP_GRACE_S = 15.0
_LOG_TAIL_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_USER_ERROR = re.compile(r"AdaSpecError: (.+)")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on which nothing listens right now; another process may still take it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_file(path: Path | None) -> None:
    """Until the file exists: other servers of the machine may be under load until then."""
    while path is not None and not path.exists():
        time.sleep(HEALTH_POLL_S)


def check_port_is_free(host: str, port: int) -> None:
    """Refuse an address that another process already serves.

    Raises:
        AdaSpecError: if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the server binds: connections of a previous server in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AdaSpecError(
                f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
                "stop what uses it, or choose another port with --port."
            ) from error


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server to start: everything that ends up on SGLang's command line.

    Attributes:
        target: model directory, or a name SGLang can resolve.
        drafter: drafter directory; ``None`` serves without speculation.
        algorithm: SGLang's ``--speculative-algorithm``; used only with a drafter.
        dtype: SGLang's ``--dtype``; ``None`` leaves the choice to SGLang and the platform.
        config: AdaSpec configuration file, handed over in ``ADASPEC_CONFIG``; ``None`` clears it.
        extra: arguments appended to SGLang's command line unchanged.
        environment: variables set on top of the current environment.
    """

    target: str
    host: str = "127.0.0.1"
    port: int
    drafter: str | None = None
    algorithm: str = "ADASPEC"
    dtype: str | None = None
    config: Path | None = None
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    @property
    def url(self) -> str:
        """Base URL a client on this machine uses."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def command(self) -> list[str]:
        """The stock launch command."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.target]
        command += ["--host", self.host, "--port", str(self.port)]
        if self.dtype is not None:
            command += ["--dtype", self.dtype]
        if self.drafter is not None:
            command += ["--speculative-algorithm", self.algorithm]
            command += ["--speculative-draft-model-path", self.drafter]
        return [*command, *self.extra]

    def full_environment(self) -> dict[str, str]:
        """The current environment with this server's variables on top."""
        environment = {**os.environ, **(self.environment or {})}
        environment.pop(CONFIG_ENVIRONMENT_VARIABLE, None)
        if self.config is not None:
            environment[CONFIG_ENVIRONMENT_VARIABLE] = str(self.config)
        return environment


class ServerProcess:
    """A running server: its process, its URL and its log.

    Leaving the ``with`` block stops the server and every process it started.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path | None) -> None:
        """Wrap a process that was just started; `start_server` is the usual way to make one."""
        self.process = process
        self.url = url
        self.log = log
        # Seen descendants: those of a server that has died cannot be asked for any more.
        self._descendants: set[psutil.Process] = set()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_healthy(
        self, timeout_s: float = 600.0, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """Return as soon as ``GET /health`` answers 200.

        Args:
            timeout_s: give up after this many seconds.
            on_wait: called about four times a second with the newest log line (may be empty).

        Raises:
            AdaSpecError: if the server exits first or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        # SGLang generates a token to answer, and gives that 20 s.
        with httpx.Client(timeout=30.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise AdaSpecError(self._why_it_exited())
                healthy = self._is_healthy(client)
                self._note_descendants()
                if healthy:
                    return
                if on_wait is not None:
                    on_wait(self.last_log_line())
                time.sleep(HEALTH_POLL_S)
        raise AdaSpecError(
            f"the server did not answer on {self.url} within {timeout_s:.0f} s; "
            f"its last words: {self.last_log_line()!r}."
        )

    def _is_healthy(self, client: httpx.Client) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return client.get(f"{self.url}/health").status_code == httpx.codes.OK
        return False

    def log_tail(self) -> str:
        """The end of the log (at most 64 KiB), or nothing if output is not captured."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")

    def last_log_line(self) -> str:
        """The newest line of the log that is not blank."""
        return next((line for line in reversed(self.log_tail().splitlines()) if line.strip()), "")

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Ask the server to stop, then kill whatever of it is left; returns its exit code."""
        self._note_descendants()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self._kill()
        return self.process.wait()

    def _note_descendants(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._descendants |= set(psutil.Process(self.process.pid).children(recursive=True))

    def _kill(self) -> None:
        self._note_descendants()
        if _leads_own_group(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        for process in self._descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + STOP_GRACE_S
        while any(map(_is_alive, self._descendants)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _why_it_exited(self) -> str:
        tail = self.log_tail()
        if reasons := _USER_ERROR.findall(tail):
            return str(reasons[-1])
        where = f"; see {self.log}" if self.log else ""
        return (
            f"the server exited with code {self.process.returncode} before it answered{where}; "
            f"its last words: {self.last_log_line()!r}."
        )


def _die_with_parent() -> None:
    # SGLang's own processes ask for the same of their parent, so the whole family goes.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    # A zombie holds nothing any more, and an orphan may stay one for long: in many containers the
    # first process does not reap.
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _leads_own_group(pid: int) -> bool:
    # A process group outlives its leader, so this also holds after the server itself has exited;
    # the launcher's own group is never a child's pid.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, 0)
        return True
    return False


def start_server(
    spec: ServerSpec,
    *,
    log: Path | None = None,
    own_group: bool = True,
    command: Sequence[str] | None = None,
) -> ServerProcess:
    """Start a server and return at once; see `ServerProcess.wait_until_healthy`.

    The server is killed when the thread that called this ends without stopping it, however that
    comes about.

    Args:
        spec: what to serve and where.
        log: file that receives stdout and stderr; ``None`` inherits this process's.
        own_group: put the server in a session and process group of its own, so that nothing it
            started can survive `ServerProcess.stop`. `adaspec serve` stays in the terminal's
            group instead, so that killing the group kills both.
        command: run this instead of `ServerSpec.command`.
    """
    output = log.open("wb") if log is not None else None
    try:
        process = subprocess.Popen(
            list(command) if command is not None else spec.command(),
            env=spec.full_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=own_group,
            preexec_fn=_die_with_parent,
        )
    finally:
        if output is not None:
            output.close()
    return ServerProcess(process, spec.url, log)


@contextlib.contextmanager
def running_server(
    spec: ServerSpec, *, log: Path, timeout_s: float = 600.0
) -> Iterator[ServerProcess]:
    """A healthy server for the length of a ``with`` block; see `start_server` for the errors."""
    with start_server(spec, log=log) as server:
        server.wait_until_healthy(timeout_s)
        yield server
