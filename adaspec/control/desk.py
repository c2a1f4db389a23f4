"""The learner's side: requests are answered between two training steps."""

import hmac
from collections.abc import Callable

import msgspec
import zmq

from adaspec.control.messages import LARGEST_MESSAGE, Envelope, Reply, Request
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import Channel
from adaspec.feedback.sockets import bind


class ControlDesk:
    """Binds the endpoint and takes requests (REP). Not thread-safe.

    Attributes:
        malformed: messages that were no requests; they are answered and do nothing.
        refused: requests without the right token; the same.
    """

    def __init__(self, channel: Channel) -> None:
        self._line = bind(zmq.REP, channel.control, {zmq.MAXMSGSIZE: LARGEST_MESSAGE})
        self._socket = self._line.socket
        # Only once the address is ours: the token of a learner that runs stays valid.
        self._token = channel.make_control_token()
        self.malformed = self.refused = 0

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
        self._line.close()

    def _answer(self, message: bytes, act: Callable[[Request], str]) -> Reply:
        try:
            envelope = msgspec.msgpack.decode(message, type=Envelope)
        except msgspec.DecodeError as error:
            self.malformed += 1
            return Reply(
                done=False,
                message=f"the learner did not understand the request ({error}); use the `adaspec` "
                "of the learner's version.",
            )
        if not hmac.compare_digest(envelope.token.encode(), self._token.encode()):
            self.refused += 1
            return Reply(
                done=False,
                message="the learner does not know the request's token; ask as the user that the "
                "learner runs as, or with the operator's keys.",
            )
        try:
            return Reply(done=True, message=act(envelope.request))
        except AdaSpecError as error:
            return Reply(done=False, message=str(error))
