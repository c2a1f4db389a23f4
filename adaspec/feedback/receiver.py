"""The learner's end of the feedback stream."""

from dataclasses import dataclass

import zmq

from adaspec.feedback.record import Record
from adaspec.feedback.sockets import Endpoint, Options, bind
from adaspec.feedback.wire import MAX_FRAME_BYTES, MalformedRecordError, decode


@dataclass(frozen=True)
class ReceiverStats:
    """Totals since start.

    Attributes:
        received: messages of any kind.
        received_bytes: their payload.
        malformed: messages that are no records of this wire format.
        foreign: records about another drafter than ours.
    """

    received: int
    received_bytes: int
    malformed: int
    foreign: int


class FeedbackReceiver:
    """Receives and decodes records; bad messages are counted and skipped.

    Args:
        endpoint: address to bind.
        lineage: records of other lineages are skipped.
    """

    def __init__(self, endpoint: Endpoint, lineage: str) -> None:
        self._lineage = lineage
        self._received = self._bytes = self._malformed = self._foreign = 0
        options: Options = {zmq.RCVHWM: 64, zmq.MAXMSGSIZE: MAX_FRAME_BYTES}
        self._line = bind(zmq.PULL, endpoint, options)
        self._socket = self._line.socket

    def receive(self, timeout: float) -> Record | None:
        """The next good record, or None if a message was skipped or none came in ``timeout`` s."""
        if not self._socket.poll(round(timeout * 1000)):
            return None
        frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        self._received += 1
        self._bytes += sum(frame.nbytes for frame in frames)
        try:
            record = decode(frames)
        except MalformedRecordError:
            self._malformed += 1
            return None
        if record.lineage != self._lineage:
            self._foreign += 1
            return None
        return record

    def stats(self) -> ReceiverStats:
        """Counters; may be called from any thread."""
        return ReceiverStats(self._received, self._bytes, self._malformed, self._foreign)

    def close(self) -> None:
        """Release the address."""
        self._line.close()
