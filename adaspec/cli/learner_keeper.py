"""The learner beside a server: started, listened to, and started again when it dies or hangs."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaspec.feedback import Endpoint
    from adaspec.versions import StatusListener

_POLL_S = 0.5
_STOP_GRACE_S = 15.0
_LONGEST_SILENCE_S = 3600.0
_LOG_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Looked up here: between fork and exec, the loader's lock may be held for ever.
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a keeper waits, in seconds.

    Attributes:
        silence: without a status, until the learner counts as hung. Doubled each time, up to an
            hour: it may have been slow only, and a slow learner must get through.
        first_pause: before it is started again; doubled with each death,
        longest_pause: up to this.
        settled: life after which the pause is the first one again.
    """

    silence: float = 120.0
    first_pause: float = 1.0
    longest_pause: float = 60.0
    settled: float = 300.0


class LearnerKeeper:
    """Keeps a learner running for the length of a ``with`` block.

    The server does not depend on it: whatever happens here is told, in one sentence, and mended.

    Args:
        command: the learner's.
        status: endpoint of its status stream, which shows that it lives.
        log: file that receives its output, emptied first; ``None`` for the terminal.
        say: told about each death, from the keeper's thread.
        patience: see `Patience`.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        status: "Endpoint",
        log: Path | None,
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self._command = command
        self._status = status
        self._log = log
        self._say = say
        self._patience = patience
        self._silence = patience.silence
        self._output: FileIO | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="adaspec-keeper", daemon=True)

    def __enter__(self) -> "LearnerKeeper":
        if self._log is not None:
            self._output = self._log.open("a+b", buffering=0)
            self._output.truncate(0)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ask_to_stop()
        self._thread.join()
        if self._output is not None:
            self._output.close()

    def ask_to_stop(self) -> None:
        """Let the learner save its state and leave; returns at once."""
        self._stop.set()

    def _keep(self) -> None:
        # Imported here: torch takes seconds, and --help should not.
        from adaspec.versions import StatusListener

        listener = StatusListener(self._status)
        pause = self._patience.first_pause
        while not self._stop.is_set():
            started, log_start = time.monotonic(), self._log_size()
            end = self._run(listener)
            if end is None:
                break
            if time.monotonic() - started >= self._patience.settled:
                pause = self._patience.first_pause
            self._say(
                f"The learner {end} and is started again in {pause:g} s; the server goes on with "
                f"the version it has.{self._last_words(log_start)}"
            )
            self._stop.wait(pause)
            pause = min(2 * pause, self._patience.longest_pause)
        listener.close()

    def _run(self, listener: "StatusListener") -> str | None:
        """Run a learner to its end, and say how it came; ``None`` if the end was asked for."""
        try:
            process = self._start()
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        heard = time.monotonic()
        while not self._stop.is_set():
            status = listener.poll(_POLL_S)
            if process.poll() is not None:
                return f"has ended with code {process.returncode}"
            if status is not None and status.process == process.pid:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._silence:
                process.kill()
                process.wait()
                silence, self._silence = self._silence, min(2 * self._silence, _LONGEST_SILENCE_S)
                return f"has given no sign of life for {silence:g} s, was killed"
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
        process.kill()
        process.wait()
        return None

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output is not None else None,
            preexec_fn=_end_with_parent,
        )

    def _log_size(self) -> int:
        return 0 if self._output is None else os.fstat(self._output.fileno()).st_size

    def _last_words(self, log_start: int) -> str:
        """The last line that a learner wrote behind ``log_start``, and where to read more."""
        if self._output is None:
            return ""
        start = max(log_start, self._log_size() - _LOG_TAIL_BYTES)
        lines = os.pread(self._output.fileno(), _LOG_TAIL_BYTES, start).decode(errors="replace")
        last = next((line for line in reversed(lines.splitlines()) if line.strip()), "none")
        return f" Its last words ({self._log}): {last.strip()}"


def _end_with_parent() -> None:
    # The parent is the keeper's thread, which lives as long as the command.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
