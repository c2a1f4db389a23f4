"""The operator's side."""

import msgspec
import zmq

from adaspec.control.messages import LARGEST_MESSAGE, Reply, Request
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import check_endpoint


def ask(endpoint: str, request: Request, timeout_s: float = 120.0) -> str:
    """Have a learner carry out a request; its answer.

    Args:
        endpoint: `Channel.control`.
        timeout_s: a learner answers between two training steps or after judging a candidate.

    Raises:
        AdaSpecError: if the learner refused, or none answered in time.
    """
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        socket.connect(check_endpoint(endpoint))
        socket.send(msgspec.msgpack.encode(request))
        if not socket.poll(round(timeout_s * 1000)):
            raise AdaSpecError(
                f"no learner answered at {endpoint} within {timeout_s:g} s; start one, or name its "
                "channel directory with --channel."
            )
        reply = msgspec.msgpack.decode(b"".join(socket.recv_multipart()), type=Reply)
    except msgspec.DecodeError as error:
        raise AdaSpecError(
            f"what answered at {endpoint} is no learner of this version ({error}); use the "
            "`adaspec` it was started with."
        ) from error
    finally:
        context.destroy(linger=0)
    if not reply.done:
        raise AdaSpecError(reply.message)
    return reply.message
