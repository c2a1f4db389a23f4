"""Learners to be killed by the dozen: forked from a process that has everything imported.

What runs is `adaspec learn`'s own command, in a process of its own.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from adaspec.feedback import Channel
from adaspec.versions import LearnerStatus, StatusListener

Harm = Callable[[], None]

_MODULE = "online.command"
_SLICE_S = 0.0002


class ForkedLearner:
    """A running learner.

    Args:
        log: file that its output is added to.
        options: of ``adaspec learn``.
        harm: called in its process before it starts; see `tests.server.harms`.
    """

    def __init__(self, log: Path, options: dict[str, Path], harm: Harm | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_MODULE])
        self.log_path = log
        self.process: ForkServerProcess = context.Process(
            target=_run, args=(log, options, harm), daemon=True
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code, negative for a signal."""
        os.kill(self.pid, number)
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def kill_when(
        self, near: Callable[[], bool], moment: Callable[[], bool], seconds: float = 120.0
    ) -> None:
        """Kill it while ``moment`` is true.

        Args:
            near: while it is true, the learner runs in slices of a fraction of a millisecond,
                between which the disk is looked at.
        """
        deadline = time.monotonic() + seconds
        while not self._stopped_at(near, moment):
            assert time.monotonic() < deadline, f"the moment did not come\n{self.log()[-3000:]}"
            time.sleep(_SLICE_S)
        self.end(signal.SIGKILL)

    def _stopped_at(self, near: Callable[[], bool], moment: Callable[[], bool]) -> bool:
        """Whether it was stopped at the moment; if not, it runs on."""
        if not near() and not moment():
            return False
        self.stop()
        if moment():
            return True
        self.resume()
        return False

    def stop(self) -> None:
        """Freeze it; it does nothing any more when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        process = psutil.Process(self.pid)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(_SLICE_S)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class Statuses:
    """The learners' status stream."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._listener = StatusListener(channel.status)
        self._heard: ForkedLearner | None = None

    def wait(
        self,
        learner: ForkedLearner,
        condition: Callable[[LearnerStatus], bool] = lambda status: True,
        seconds: float = 120.0,
    ) -> LearnerStatus:
        """The first status of this learner that fulfils a condition."""
        if learner is not self._heard:  # a listener that lost another one waits before it tries
            self.close()
            self._listener, self._heard = StatusListener(self._channel.status), learner
        deadline = time.monotonic() + seconds
        last: LearnerStatus | None = None
        while time.monotonic() < deadline:
            status = self._listener.poll(0.1)
            if status is not None and status.process == learner.pid:
                last = status
                if condition(status):
                    return status
        raise AssertionError(f"it did not come true; last {last}\n{learner.log()[-3000:]}")

    def close(self) -> None:
        self._listener.close()


def _run(log: Path, options: dict[str, Path], harm: Harm | None) -> None:
    """The learner process."""
    from online.__main__ import main

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if harm is not None:
        harm()
    words = [word for name, path in options.items() for word in (f"--{name}", str(path))]
    sys.argv = ["adaspec learn", *words]
    main()
