"""Telling servers that another version is live.

An announcement is only a hint that saves waiting: the pointer file is the truth. A watcher reads
it when it starts, whenever it is told to, and every few seconds, so that no message can be missed
and a foreign or garbled one does nothing.
"""

import time
from pathlib import Path

import msgspec
import zmq

from adaspec.errors import AdaSpecError
from adaspec.feedback.sockets import Endpoint, Options, bind, connect
from adaspec.versions.manifest import Pointer
from adaspec.versions.store import read_pointer


class Announcer:
    """Publishes pointers to whoever listens.

    Args:
        endpoint: address to bind.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._line = bind(zmq.PUB, endpoint)

    def announce(self, pointer: Pointer) -> None:
        """Send and forget; never waits."""
        self._line.socket.send(msgspec.msgpack.encode(pointer))

    def close(self) -> None:
        """Release the address."""
        self._line.close()


class VersionWatcher:
    """Notices changes of a store's pointer; neither the store nor a learner need exist yet.

    Not thread-safe.

    Args:
        store: directory of the version store.
        endpoint: where the learner's `Announcer` binds.
        lineage: pointers of other lineages are ignored.
        reread_seconds: read the pointer at least this often.
    """

    def __init__(
        self, store: Path, endpoint: Endpoint, lineage: str, reread_seconds: float = 5.0
    ) -> None:
        self._store = store
        self._lineage = lineage
        self._reread_seconds = reread_seconds
        self._next_read = 0.0
        self._seen: Pointer | None = None
        options: Options = {
            zmq.RCVHWM: 16,
            zmq.RECONNECT_IVL_MAX: 2000,
            zmq.MAXMSGSIZE: 1 << 16,
            zmq.SUBSCRIBE: b"",
        }
        self._line = connect(zmq.SUB, endpoint, options)
        self._socket = self._line.socket

    def poll(self, timeout: float = 0.0) -> Pointer | None:
        """The pointer, if it has changed since the last call that returned one.

        Args:
            timeout: seconds to wait for an announcement.

        Raises:
            AdaSpecError: if the pointer is damaged or of another lineage; later calls try again.
        """
        if self._socket.poll(round(timeout * 1000)):
            while self._socket.poll(0):
                self._socket.recv_multipart()
            self._next_read = 0.0
        if time.monotonic() < self._next_read:
            return None
        self._next_read = time.monotonic() + self._reread_seconds
        pointer = read_pointer(self._store)
        # All of it: a store that was deleted and made anew counts its sequence from the start.
        if pointer is None or pointer == self._seen:
            return None
        if pointer.lineage != self._lineage:
            raise AdaSpecError(
                f"{self._store} holds versions of lineage {pointer.lineage}, but the server runs "
                f"{self._lineage}; give learner and server the same drafter."
            )
        self._seen = pointer
        return pointer

    def close(self) -> None:
        """Stop listening."""
        self._line.close()
