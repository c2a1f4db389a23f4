"""The server's end of the feedback stream: bounded, lossy, and never in the way of serving.

Callers put records into a queue and go on; one thread encodes and sends. What does not fit is
dropped and counted. A request that lost a record is of no further use to the learner, so its later
records are dropped at once, and new requests are turned away while the queue is more than half
full: under pressure the stream holds fewer requests, not torn ones.
"""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

import zmq

from adaspec.feedback.record import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    Record,
    RollbackRecord,
)
from adaspec.feedback.sampling import in_share
from adaspec.feedback.sockets import Endpoint, Options, connect
from adaspec.feedback.wire import encode

_POLL_MS = 100
_REMEMBERED_REQUESTS = 8192


@dataclass(frozen=True)
class SenderStats:
    """Totals since start.

    Attributes:
        offered: records handed over by the server.
        sent: records given to ZeroMQ while a learner was connected.
        sent_bytes: their tensors' size.
        dropped: records by reason: ``queue-full`` (the oldest gave way), ``pressure`` (a new
            request while the queue was half full), ``gap`` (its request lost a record before),
            ``too-large``.
        queued, queued_bytes: what waits now.
    """

    offered: int
    sent: int
    sent_bytes: int
    dropped: dict[str, int]
    queued: int
    queued_bytes: int


class FeedbackSender:
    """Hands records to a learner, which may be absent.

    Args:
        endpoint: where the learner's `FeedbackReceiver` binds.
        share: share of requests to send, 0 to 1; `wants` picks them by their id.
        bytes_per_second: average rate the stream is held to, with bursts of one second.
        queue_bytes: cap of the queue.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        share: float = 1.0,
        bytes_per_second: float = 64e6,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self._share = share
        self._rate = bytes_per_second
        self._capacity = queue_bytes
        self._changed = threading.Condition()
        self._queue: deque[tuple[Record, int]] = deque()
        self._queued_bytes = 0
        self._torn: dict[str, None] = {}
        self._offered = self._sent = self._sent_bytes = 0
        self._dropped: Counter[str] = Counter()
        self._closing = False
        options: Options = {
            # Queue for connected peers only, and little: what is in ZeroMQ cannot be dropped.
            zmq.IMMEDIATE: 1,
            zmq.SNDHWM: 4,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
        }
        # Used by the thread only, once that has started.
        self._line = connect(zmq.PUSH, endpoint, options)
        self._thread = threading.Thread(target=self._run, name="adaspec-feedback", daemon=True)
        self._thread.start()

    def wants(self, request: str) -> bool:
        """Whether records of this request are worth making (sampled, and complete so far)."""
        return request not in self._torn and in_share(request, self._share, "feedback")

    def offer(self, record: Record) -> bool:
        """Queue a record without waiting; its tensors must not change afterwards.

        Returns:
            False if the record was dropped.
        """
        size = record_bytes(record)
        with self._changed:
            self._offered += 1
            if self._is_torn(record):
                self._dropped["gap"] += 1
                return False
            if size > self._capacity:
                self._drop(record, "too-large")
                return False
            opens_request = not isinstance(record, RollbackRecord) and record.number == 0
            if opens_request and self._queued_bytes > self._capacity // 2:
                self._drop(record, "pressure")
                return False
            while self._queued_bytes + size > self._capacity:
                oldest, oldest_size = self._queue.popleft()
                self._queued_bytes -= oldest_size
                self._drop(oldest, "queue-full")
            if self._is_torn(record):  # its own earlier record just gave way
                self._dropped["gap"] += 1
                return False
            self._queue.append((record, size))
            self._queued_bytes += size
            self._changed.notify()
        return True

    def stats(self) -> SenderStats:
        """A consistent snapshot."""
        with self._changed:
            return SenderStats(
                self._offered,
                self._sent,
                self._sent_bytes,
                dict(self._dropped),
                len(self._queue),
                self._queued_bytes,
            )

    def close(self, timeout: float = 1.0) -> None:
        """Stop the thread; what is still queued is discarded. Waits ``timeout`` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _is_torn(self, record: Record) -> bool:
        return not isinstance(record, RollbackRecord) and record.request in self._torn

    def _drop(self, record: Record, reason: str) -> None:
        self._dropped[reason] += 1
        if isinstance(record, RollbackRecord):
            return
        self._torn[record.request] = None
        if len(self._torn) > _REMEMBERED_REQUESTS:
            del self._torn[next(iter(self._torn))]

    def _run(self) -> None:
        socket = self._line.socket
        budget = _ByteBudget(self._rate)
        try:
            while not self._closing:
                # Take a record only when it can leave, so that until then the queue may drop it.
                if not socket.poll(_POLL_MS, zmq.POLLOUT):
                    continue
                taken = self._take(budget)
                if taken is None:
                    continue
                record, size = taken
                socket.send_multipart(encode(record), copy=False)
                with self._changed:
                    self._sent += 1
                    self._sent_bytes += size
        finally:
            self._line.close()

    def _take(self, budget: "_ByteBudget") -> tuple[Record, int] | None:
        """The oldest record worth sending, once the budget covers it; None after a while."""
        with self._changed:
            while self._queue and self._is_torn(self._queue[0][0]):
                self._queued_bytes -= self._queue.popleft()[1]
                self._dropped["gap"] += 1
            wait = budget.wait_for(self._queue[0][1]) if self._queue else _POLL_MS / 1000
            if wait > 0:
                self._changed.wait(min(wait, _POLL_MS / 1000))
                return None
            record, size = self._queue.popleft()
            self._queued_bytes -= size
            budget.spend(size)
            return record, size


class _ByteBudget:
    """Token bucket of one second's worth; one record larger than that may pass when it is full."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate
        self._filled_at = time.monotonic()

    def wait_for(self, size: int) -> float:
        """Seconds until ``size`` bytes may be spent."""
        now = time.monotonic()
        self._level = min(self._rate, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return max(0.0, (min(size, self._rate) - self._level) / self._rate)

    def spend(self, size: int) -> None:
        self._level -= size


def record_bytes(record: Record) -> int:
    """Size of a record's tensors."""
    match record:
        case EndRecord() | RollbackRecord():
            return 0
        case ContextRecord():
            return record.token_ids.nbytes + record.taps.nbytes
        case BlockRecord():
            tokens = record.token_ids.nbytes + record.drafts.nbytes
            return tokens + record.taps.nbytes + record.teacher.nbytes
