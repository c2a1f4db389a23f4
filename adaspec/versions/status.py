"""The learner's state as a stream: what monitors show and the server's metrics endpoint repeats."""

from typing import Literal

import msgspec
import zmq

from adaspec.feedback.sockets import Endpoint, Options, bind, connect
from adaspec.versions.manifest import GateVerdict

# Resting: nothing improved lately, and traffic has not changed since.
Activity = Literal["waiting", "training", "judging", "resting", "paused", "stopping"]


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals since the base version, unless said otherwise; counters survive a restart.

    Attributes:
        time: Unix time, seconds.
        process: process id of the learner.
        live_version, sequence: of the pointer.
        pinned: version that an operator keeps live; None if the gate decides.
        steps, skipped_steps: optimiser steps taken, and given up because something was not finite.
        tokens_seen: response tokens trained on, repeats counted.
        loss, cross_entropy, divergence, accuracy: of the last step; None before the first.
        trust: of an ensemble, the weight of each expert, the base first.
        learning_seconds: wall time spent in training and judging.
        published, kept, rolled_back: gate decisions, and roll-backs of any origin.
        failures: publications and state files that could not be written.
        replay_trajectories, replay_bytes, held_back: what is in memory now.
        feedback: counters of the intake since this process started, by name.
        verdict: the last gate decision.
    """

    format: Literal[1] = 1
    lineage: str
    time: float
    process: int
    activity: Activity
    live_version: int
    sequence: int
    pinned: int | None = None
    steps: int
    skipped_steps: int
    tokens_seen: int
    loss: float | None
    cross_entropy: float | None
    divergence: float | None
    accuracy: float | None
    trust: tuple[float, ...] = ()
    learning_seconds: float
    published: int
    kept: int
    rolled_back: int
    failures: int
    replay_trajectories: int
    replay_bytes: int
    held_back: int
    feedback: dict[str, int]
    verdict: GateVerdict | None


class StatusPublisher:
    """Sends statuses to whoever listens; binds the endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._line = bind(zmq.PUB, endpoint, {zmq.SNDHWM: 16})

    def publish(self, status: LearnerStatus) -> None:
        """Send one JSON message; never waits."""
        self._line.socket.send(msgspec.json.encode(status))

    def close(self) -> None:
        """Release the address."""
        self._line.close()


class StatusListener:
    """Receives statuses; the learner may come and go. Not thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        options: Options = {
            zmq.RECONNECT_IVL_MAX: 2000,
            zmq.MAXMSGSIZE: 1 << 20,
            zmq.SUBSCRIBE: b"",
        }
        self._line = connect(zmq.SUB, endpoint, options)
        self._socket = self._line.socket

    def poll(self, timeout: float = 0.0) -> LearnerStatus | None:
        """The newest status that has arrived; waits up to ``timeout`` seconds for one."""
        newest: LearnerStatus | None = None
        wait = round(timeout * 1000)
        while self._socket.poll(wait):
            wait = 0
            message = b"".join(self._socket.recv_multipart())
            try:
                newest = msgspec.json.decode(message, type=LearnerStatus)
            except msgspec.DecodeError:
                continue  # another sender's message, or another format
        return newest

    def close(self) -> None:
        """Stop listening."""
        self._line.close()
