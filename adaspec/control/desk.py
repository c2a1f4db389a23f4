"""The learner's side: requests are answered between two training steps."""

from collections.abc import Callable

import msgspec
import zmq

from adaspec.control.messages import LARGEST_MESSAGE, Reply, Request
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import check_endpoint


class ControlDesk:
    """Binds the endpoint and takes requests (REP). Not thread-safe.

    Attributes:
        malformed: messages that were no requests; they are answered and do nothing.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.bind(check_endpoint(endpoint))
        self.malformed = 0

    def serve(self, act: Callable[[Request], str]) -> None:
        """Carry out every request that waits; returns at once if there is none.

        Args:
            act: carries one out and says so in a sentence; an `AdaSpecError` says why it was not.
        """
        while self._socket.poll(0):
            reply = self._answer(b"".join(self._socket.recv_multipart()), act)
            self._socket.send(msgspec.msgpack.encode(reply))

    def close(self) -> None:
        """Release the address."""
        self._context.destroy(linger=0)

    def _answer(self, message: bytes, act: Callable[[Request], str]) -> Reply:
        try:
            request = msgspec.msgpack.decode(message, type=Request)
        except msgspec.DecodeError as error:
            self.malformed += 1
            return Reply(
                done=False,
                message=f"the learner did not understand the request ({error}); use the `adaspec` "
                "of the learner's version.",
            )
        try:
            return Reply(done=True, message=act(request))
        except AdaSpecError as error:
            return Reply(done=False, message=str(error))
