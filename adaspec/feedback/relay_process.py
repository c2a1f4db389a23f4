"""The relay process: receives captures from its parent, sends records to the learner.

    python -m adaspec.feedback.relay_process OPTIONS_JSON

It is started by `FeedbackRelay` and is killed with it.
"""

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import sys
import time

import msgspec
import torch

from adaspec.feedback.collector import FeedbackCollector
from adaspec.feedback.relay import RelayOptions
from adaspec.feedback.relay_pipe import receive_frames
from adaspec.feedback.relay_wire import Lost, Rollback, decode
from adaspec.feedback.sender import FeedbackSender

logger = logging.getLogger(__name__)

_NICENESS = 5  # behind the server, before a learner
_STATS_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def relay(options: RelayOptions) -> None:
    """Relay until the parent is gone."""
    captures = socket.socket(fileno=options.captures)
    stats = socket.socket(fileno=options.stats)
    stats.setblocking(False)
    sender = FeedbackSender(
        options.feedback,
        share=options.share,
        bytes_per_second=options.bytes_per_second,
        queue_bytes=options.queue_bytes,
    )
    collector = FeedbackCollector(
        sender,
        options.lineage,
        teacher_rows=options.teacher_rows,
        steps_per_record=options.steps_per_record,
    )
    told_at = 0.0
    while True:
        if select.select([captures], [], [], _STATS_S)[0]:
            try:
                frames = receive_frames(captures)
            except (EOFError, ConnectionError):
                return
            try:
                _handle(collector, frames)
            except Exception:
                logger.exception("a feedback capture could not be read and was dropped")
        if time.monotonic() - told_at >= _STATS_S:
            told_at = time.monotonic()
            with contextlib.suppress(OSError):  # the parent has older ones to read yet
                stats.send(msgspec.msgpack.encode(sender.stats()))


def _handle(collector: FeedbackCollector, frames: list[memoryview]) -> None:
    message = decode(frames)
    if isinstance(message, Lost):
        collector.forget(message.requests)
    elif isinstance(message, Rollback):
        collector.report_rollback(message.version, message.restored, message.reason, message.cause)
    else:
        collector.submit(message)


def keep_out_of_core_dumps() -> None:
    """What users say is in this process's memory, and must not be on disk if it crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> None:
    """Settle as a child of the server, and relay."""
    options = msgspec.json.decode(sys.argv[1], type=RelayOptions)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:
        return  # it ended before that
    # The terminal's Ctrl-C goes to the whole group; the server says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="[%(asctime)s] feedback relay: %(message)s")
    keep_out_of_core_dumps()
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    relay(options)


if __name__ == "__main__":
    main()
