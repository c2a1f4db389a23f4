"""A process of its own that turns captures into records.

Slicing batches by request is a few hundred small operations a step. On a thread of the server they
compete with the scheduler for Python's global lock and doubled its step time; here they cost it
nothing. What is left to the server is one thread that waits for a copy and sends a message.

Where the host is what a step waits for, the Python of that thread still adds to the step, and a
call of PyTorch more than its time, since each gives the lock away. So it does as little as it can:
captures are encoded when they are submitted, there is no library's queue, and the process is looked
after only now and then.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import msgspec

from adaspec.feedback.captures import Capture, EndCapture
from adaspec.feedback.record import RollbackCause, TeacherRows
from adaspec.feedback.relay_pipe import send_frames
from adaspec.feedback.relay_wire import Lost, Rollback, encode
from adaspec.feedback.sampling import in_share
from adaspec.feedback.sender import SenderStats
from adaspec.feedback.sockets import Endpoint

logger = logging.getLogger(__name__)

_MIND_S = 0.25  # between looks after the process
_GATHER_S = 0.01  # while captures come, the thread wakes by the clock: waking it costs a step more
_MOST_STATS_BYTES = 1 << 16
_RESTART_S = 5.0
_PENDING_BYTES = 128 << 20  # of page-locked memory that wait for the relay
_REMEMBERED_REQUESTS = 8192
_NOTHING = SenderStats(0, 0, 0, {}, 0, 0)


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the relay process is told when it is started.

    Attributes:
        parent: process id; the relay ends when it does.
        captures, stats: file descriptors of sockets: a stream of messages (`relay_pipe`) that the
            relay reads, and datagrams that it writes.
        feedback: endpoint of the learner.
        lineage, teacher_rows, steps_per_record: see `FeedbackCollector`.
        share, bytes_per_second, queue_bytes: see `FeedbackSender`.
    """

    parent: int = 0
    captures: int = -1
    stats: int = -1
    feedback: Endpoint
    lineage: str
    share: float = 1.0
    bytes_per_second: float = 64e6
    queue_bytes: int = 256 << 20
    teacher_rows: TeacherRows = "committed"
    steps_per_record: int = 16


class _Outgoing(NamedTuple):
    """An encoded message; ``wait`` returns when its tensors are there.

    ``requests`` lose their place with it; empty for what must not give way.
    """

    frames: Sequence[bytes | memoryview]
    requests: Sequence[str] = ()
    wait: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        return sum(len(frame) for frame in self.frames) if self.requests else 0


class FeedbackRelay:
    """The server's end: a `CaptureSink` that hands everything to a process of its own.

    Args:
        options: what concerns the parent is filled in here.
    """

    def __init__(self, options: RelayOptions) -> None:
        self._options = msgspec.structs.replace(options, parent=os.getpid())
        self._changed = threading.Condition()
        self._pending: deque[_Outgoing] = deque()
        self._pending_bytes = 0
        self._lost: dict[str, None] = {}
        self._untold: list[str] = []  # lost requests that the relay still collects
        self._dropped: Counter[str] = Counter()
        self._stats = _NOTHING
        self._closing = False
        self._idle = False
        self._process: subprocess.Popen[bytes] | None = None
        self._captures: socket.socket | None = None
        self._stats_from: socket.socket | None = None
        self._started_at = self._minded_at = 0.0
        self._thread = threading.Thread(target=self._run, name="adaspec-relay", daemon=True)
        self._thread.start()

    def wants(self, request: str) -> bool:
        """See `CaptureSink`."""
        return request not in self._lost and in_share(request, self._options.share, "feedback")

    def submit(self, capture: Capture) -> None:
        """See `CaptureSink`; the oldest capture gives way when too much waits."""
        requests: Sequence[str] = ()
        wait = None
        if not isinstance(capture, EndCapture):
            requests, wait = capture.requests, capture.wait
        try:
            frames = encode(capture)
        except Exception:
            self._drop_broken(requests)
        else:
            self._append(_Outgoing(frames, requests, wait))

    def report_rollback(
        self, version: int, restored: int, reason: str, cause: RollbackCause = "acceptance"
    ) -> None:
        """See `CaptureSink`."""
        self._append(_Outgoing(encode(Rollback(version, restored, reason, cause))))

    def stats(self) -> SenderStats:
        """The relay's totals, about a second old, with what never reached it."""
        with self._changed:
            dropped = Counter(self._stats.dropped) + self._dropped
            return SenderStats(**{**asdict(self._stats), "dropped": dict(dropped)})

    @property
    def pid(self) -> int | None:
        """Process id of the relay, once it runs."""
        return None if self._process is None else self._process.pid

    def close(self, timeout: float = 2.0) -> None:
        """Send what is pending, then stop; waits ``timeout`` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _append(self, message: _Outgoing) -> None:
        with self._changed:
            self._pending.append(message)
            self._pending_bytes += message.size
            while self._pending_bytes > _PENDING_BYTES:
                self._drop_oldest()
            if self._idle:
                self._changed.notify()

    def _drop_oldest(self) -> None:
        for position, message in enumerate(self._pending):
            if message.requests:
                del self._pending[position]
                self._pending_bytes -= message.size
                self._dropped["relay-full"] += 1
                self._lose(message.requests)
                return

    def _drop_broken(self, requests: Iterable[str]) -> None:
        """Feedback is optional: whatever is wrong with a capture must end neither step nor stream.

        Call it where the exception is handled.
        """
        logger.exception("a feedback capture could not be sent and was dropped")
        with self._changed:
            self._dropped["relay-error"] += 1
            self._lose(requests)

    def _lose(self, requests: Iterable[str]) -> None:
        self._untold += requests
        self._lost.update(dict.fromkeys(requests))
        while len(self._lost) > _REMEMBERED_REQUESTS:
            del self._lost[next(iter(self._lost))]

    def _run(self) -> None:
        try:
            while True:
                self._mind_process()
                if self._has_ended():
                    return
                message = self._next_message()
                while message is not None:
                    self._send(message)
                    self._mind_process()
                    message = self._next_message()
        finally:
            self._hang_up()

    def _send(self, message: _Outgoing) -> None:
        """Wait for a message's copies and send it, to the next process if this one ends."""
        try:
            if message.wait is not None:
                message.wait()
        except Exception:
            self._drop_broken(message.requests)
            return
        while not self._closing or self._captures is not None:
            if self._captures is None:
                time.sleep(_MIND_S)
                self._mind_process()
                continue
            try:
                send_frames(self._captures, message.frames)
            except OSError:
                self._hang_up()
            else:
                return

    def _hang_up(self) -> None:
        for end in (self._captures, self._stats_from):
            if end is not None:
                end.close()
        self._captures = self._stats_from = None
        self._minded_at = 0.0

    def _has_ended(self) -> bool:
        """Wait for messages to gather; whether there are none, and there will be none."""
        with self._changed:
            if not self._closing and not self._pending:
                self._idle = True
                self._changed.wait(_MIND_S)
                self._idle = False
            if not self._pending:
                return self._closing
            closing = self._closing
        if not closing:
            time.sleep(_GATHER_S)
        return False

    def _next_message(self) -> _Outgoing | None:
        with self._changed:
            if self._untold:
                lost, self._untold = Lost(self._untold), []
                return _Outgoing(encode(lost))
            if not self._pending:
                return None
            message = self._pending.popleft()
            self._pending_bytes -= message.size
            return message

    def _mind_process(self) -> None:
        """Start the relay, start it again if it has ended, and hear what it has counted."""
        now = time.monotonic()
        if now - self._minded_at < _MIND_S:
            return
        self._minded_at = now
        self._read_stats()
        process = self._process
        if process is not None and process.poll() is None:
            return
        if process is not None:
            self._hang_up()
            if now - self._started_at < _RESTART_S:
                return
            logger.warning(
                "the feedback relay ended with code %s and is started again; requests in flight "
                "are lost to the learner",
                process.returncode,
            )
        self._started_at = now
        self._captures, captures = socket.socketpair()
        self._stats_from, stats = socket.socketpair(type=socket.SOCK_DGRAM)
        self._stats_from.setblocking(False)
        ends = {"captures": captures.fileno(), "stats": stats.fileno()}
        options = msgspec.structs.replace(self._options, **ends)
        with captures, stats:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "adaspec.feedback.relay_process"),
                    msgspec.json.encode(options).decode(),
                ],
                # It needs no GPU, and one thread.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=ends.values(),
            )

    def _read_stats(self) -> None:
        newest = None
        with contextlib.suppress(OSError):  # nothing there, or nobody
            while self._stats_from is not None:
                newest = self._stats_from.recv(_MOST_STATS_BYTES)
        if newest is not None:
            with self._changed:
                self._stats = msgspec.msgpack.decode(newest, type=SenderStats)
