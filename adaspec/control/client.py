"""The operator's side."""

import msgspec
import zmq

from adaspec.control.messages import LARGEST_MESSAGE, Envelope, Reply, Request
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import Channel
from adaspec.feedback.sockets import connect

_MEETING_S = 10.0


def ask(channel: Channel, request: Request, timeout_s: float = 120.0) -> str:
    """Have a learner carry out a request; its answer.

    Args:
        channel: of the learner.
        timeout_s: a learner answers between two training steps or after judging a candidate. One
            that is not there, or has other keys, is not waited for longer than 10 s.

    Raises:
        AdaSpecError: if the learner refused, or none answered in time.
    """
    endpoint = channel.control
    # Not ready to send before both sides have accepted each other's keys.
    line = connect(zmq.REQ, endpoint, {zmq.MAXMSGSIZE: LARGEST_MESSAGE, zmq.IMMEDIATE: 1})
    try:
        socket = line.socket
        meeting_s = min(_MEETING_S, timeout_s)
        if not socket.poll(round(meeting_s * 1000), zmq.POLLOUT):
            theirs = "" if endpoint.keys is None else f" that knows {endpoint.keys}"
            raise AdaSpecError(
                f"no learner{theirs} was met at {endpoint} within {meeting_s:g} s; start one, or "
                "name its channel with --channel, or --address and --keys."
            )
        envelope = Envelope(token=channel.control_token(), request=request)
        socket.send(msgspec.msgpack.encode(envelope))
        if not socket.poll(round(timeout_s * 1000)):
            raise AdaSpecError(
                f"the learner at {endpoint} gave no answer within {timeout_s:g} s; look at its "
                "log, and at `adaspec monitor` for what was done."
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
