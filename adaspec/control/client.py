"""The operator's side."""

import msgspec
import zmq

from adaspec.control.messages import LARGEST_MESSAGE, Envelope, Reply, Request
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import Channel
from adaspec.feedback.sockets import connect


def ask(channel: Channel, request: Request, timeout_s: float = 120.0) -> str:
    """Have a learner carry out a request; its answer.

    Args:
        channel: of the learner.
        timeout_s: a learner answers between two training steps or after judging a candidate.

    Raises:
        AdaSpecError: if the learner refused, or none answered in time.
    """
    endpoint = channel.control
    line = connect(zmq.REQ, endpoint, {zmq.MAXMSGSIZE: LARGEST_MESSAGE})
    try:
        socket = line.socket
        envelope = Envelope(token=channel.control_token(), request=request)
        socket.send(msgspec.msgpack.encode(envelope))
        if not socket.poll(round(timeout_s * 1000)):
            raise AdaSpecError(
                f"no learner answered at {endpoint} within {timeout_s:g} s; start one, or name its "
                "channel with --channel, or --address and --keys."
            )
        reply = msgspec.msgpack.decode(b"".join(socket.recv_multipart()), type=Reply)
    except msgspec.DecodeError as error:
        raise AdaSpecError(
            f"what answered at {endpoint} is no learner of this version ({error}); use the "
            "`adaspec` it was started with."
        ) from error
    finally:
        line.close()
    if not reply.done:
        raise AdaSpecError(reply.message)
    return reply.message
