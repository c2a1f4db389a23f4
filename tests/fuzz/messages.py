"""Targets: what comes through a socket or a pipe."""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from adaspec.control import ControlDesk, Inquire, Pin, Publish, Request, RollBack
from adaspec.control.messages import LARGEST_MESSAGE, Envelope, Reply
from adaspec.errors import AdaSpecError
from adaspec.feedback import (
    Endpoint,
    EndRecord,
    FeedbackReceiver,
    MalformedRecordError,
    open_channel,
    relay_wire,
    wire,
)
from adaspec.feedback.captures import EndCapture, PrefillCapture, StepCapture
from adaspec.feedback.record import HiddenTeacher
from adaspec.feedback.relay_pipe import receive_frames, send_frames
from adaspec.versions.announce import VersionWatcher
from adaspec.versions.manifest import Pointer
from adaspec.versions.status import LearnerStatus, StatusListener
from tests.feedback.records import LINEAGE, all_kinds, top_k_teacher
from tests.fuzz.mutation import either, mutate_bytes, mutate_json, mutate_msgpack
from tests.fuzz.target import Target, attempt

_WAIT_MS = 10_000

STATUS = LearnerStatus(
    lineage=LINEAGE, time=1.0, process=1, activity="training", live_version=1, sequence=2,
    steps=3, skipped_steps=0, tokens_seen=4, loss=0.5, cross_entropy=None, divergence=None,
    accuracy=0.25, trust=(0.5, 0.5), learning_seconds=1.5, published=1, kept=0, rolled_back=0,
    failures=0, replay_trajectories=1, replay_bytes=2, held_back=3, feedback={"received": 1},
    verdict=None,
)  # fmt: skip
POINTER = Pointer(lineage=LINEAGE, sequence=1, number=0, sha256="0" * 64, reason="base")


def pack(frames: Sequence[Any]) -> bytes:
    """A message of several frames as one input."""
    return msgspec.msgpack.encode([bytes(frame) for frame in frames])


def unpack(data: bytes) -> list[bytes]:
    """Its frames; any other bytes are one frame."""
    try:
        return msgspec.msgpack.decode(data, type=list[bytes])
    except (msgspec.DecodeError, RecursionError):
        return [data]


def _records() -> list[bytes]:
    torch.manual_seed(0)
    return [pack(wire.encode(record)) for record in all_kinds()]


def feedback_wire(directory: Path) -> Target:
    """Feedback records: accepted ones go over the wire again bit for bit."""

    def check(data: bytes) -> bool:
        frames = unpack(data)
        record = attempt(lambda: wire.decode(frames), MalformedRecordError)
        if record is None:
            return False
        again = [bytes(frame) for frame in wire.encode(record)]
        assert again[1:] == frames[1:]
        assert [bytes(frame) for frame in wire.encode(wire.decode(again))] == again
        return True

    return Target(check, _records(), either(mutate_msgpack), examples=300)


def feedback_receiver(directory: Path) -> Target:
    """The learner's socket: one count for every message, and the next good record arrives."""
    endpoint = Endpoint(f"ipc://{directory}/feedback.sock")
    receiver = FeedbackReceiver(endpoint, LINEAGE)
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.connect(endpoint.address)
    good = EndRecord(LINEAGE, "the good one", 0, 9, "finished")
    number = 0

    def check(data: bytes) -> bool:
        nonlocal number
        number += 1
        marker = replace(good, number=number)
        before = receiver.stats()
        sender.send_multipart(unpack(data) or [b""])
        sender.send_multipart([bytes(frame) for frame in wire.encode(marker)])
        taken = [receiver.receive(10), receiver.receive(10)]
        after = receiver.stats()
        assert taken[1] == marker
        dropped = after.malformed + after.foreign - before.malformed - before.foreign
        assert after.received - before.received == 2
        assert dropped == (taken[0] is None)
        return taken[0] is not None

    def close() -> None:
        context.destroy(linger=0)
        receiver.close()

    return Target(check, _records(), either(mutate_msgpack), close=close)


def relay_messages(directory: Path) -> Target:
    """Captures on their way to the relay process."""
    requests, width, taps = ["a", "b"], 3, 4
    step = StepCapture(
        requests, 3, [0.0, 0.5], torch.tensor([2, 5]), torch.randint(0, 90, (2, width)),
        torch.ones(2, dtype=torch.int32), torch.randint(0, 90, (2,)),
        torch.randn(2, width, taps, dtype=torch.bfloat16), HiddenTeacher(torch.randn(6, 5)),
        torch.full((2,), 3, dtype=torch.int32),
    )  # fmt: skip
    messages: list[relay_wire.Message] = [
        PrefillCapture(requests, 0, [[1, 2], [3, 4]], [0, 0], torch.randn(4, taps)),
        step,
        replace(step, teacher=top_k_teacher(6), verify_lengths=None),
        EndCapture("a", 5, "aborted"),
        relay_wire.Rollback(2, 1, "worse", "refusal"),
        relay_wire.Lost(["a"]),
    ]

    def check(data: bytes) -> bool:
        frames = [bytearray(frame) for frame in unpack(data)]
        message = attempt(lambda: relay_wire.decode(frames), ValueError)
        if message is None:
            return False
        again = relay_wire.decode([bytearray(frame) for frame in relay_wire.encode(message)])
        assert type(again) is type(message)
        return True

    seeds = [pack(relay_wire.encode(message)) for message in messages]
    found = {
        "no frames": pack([]),
        "endless nesting": pack([b"\x82\xa4type\xa3end\xa1x" + b"\x91" * 100_000]),
        "no tensors": pack([_prefill([])]),
        "an unknown type": pack([_prefill([["complex64", [1], 0, 0]]), b"\0" * 8]),
        "negative sizes": pack([_prefill([["int32", [-1, -2], 0, 0]]), b"\0" * 8]),
        "a size of 2 ** 70": pack([_prefill([["int32", [2**40, 2**40, 0], 0, 0]]), b"\0" * 8]),
    }
    return Target(check, seeds, either(mutate_msgpack), found, examples=300)


def _prefill(tensors: list[Any]) -> bytes:
    header = {"type": "prefill", "requests": [], "version": 0, "token_ids": [], "starts": []}
    return msgspec.msgpack.encode(header | {"tensors": tensors})


def relay_pipe(directory: Path) -> Target:
    """The pipe that they travel through."""

    def check(data: bytes) -> bool:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(10)
            ours.sendall(data[: 1 << 15])
            ours.shutdown(socket.SHUT_WR)
            frames = attempt(lambda: receive_frames(theirs), EOFError, ValueError)
        return frames is not None and 0 < len(frames) <= 64

    def sent(frames: Sequence[bytes]) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_frames(ours, frames)
            return theirs.recv(1 << 16)

    seeds = [sent([b"header"]), sent([b"header", b"", b"buffer" * 9])]
    count, size = (1).to_bytes(8, "little"), (2**62).to_bytes(8, "little")
    return Target(check, seeds, mutate_bytes, {"a frame of 4 EiB": count + size})


def control_desk(directory: Path) -> Target:
    """The learner's control socket: answered in a sentence, counted, carried out only if valid."""
    channel = open_channel(directory / "channel")
    desk = ControlDesk(channel)
    context = zmq.Context()
    operator = context.socket(zmq.REQ)
    operator.connect(channel.control.address)
    done: list[Request] = []

    def act(request: Request) -> str:
        done.append(request)
        if isinstance(request, Pin):
            raise AdaSpecError("there is no such version; choose another.")
        return "carried out."

    def check(data: bytes) -> bool:
        done.clear()
        before = desk.malformed + desk.refused
        operator.send(data[:LARGEST_MESSAGE])
        deadline = time.monotonic() + _WAIT_MS / 1000
        while not operator.poll(1):
            desk.serve(act)
            assert time.monotonic() < deadline, "no answer"
        reply = msgspec.msgpack.decode(operator.recv(), type=Reply)
        assert reply.message.endswith(".")
        assert desk.malformed + desk.refused - before + len(done) == 1
        assert reply.done == bool(done and not isinstance(done[0], Pin))
        return bool(done)

    def close() -> None:
        context.destroy(linger=0)
        desk.close()

    token = channel.control_token()
    requests = (Inquire(), Pin(version=3), RollBack(), Publish(directory="/drafter"))
    seeds = [msgspec.msgpack.encode(Envelope(token=token, request=r)) for r in requests]
    return Target(check, seeds, either(mutate_msgpack), close=close)


def status_stream(directory: Path) -> Target:
    """What a server hears of its learner: others' messages are skipped, the next one is read."""
    endpoint = Endpoint(f"ipc://{directory}/status.sock")
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind(endpoint.address)
    listener = StatusListener(endpoint)
    number = 0

    def mark() -> LearnerStatus:
        nonlocal number
        number += 1
        marker = msgspec.structs.replace(STATUS, process=number)
        publisher.send(msgspec.json.encode(marker))
        return marker

    while listener.poll(0.01) is None:  # until it has subscribed
        mark()

    def check(data: bytes) -> bool:
        publisher.send(data)
        marker = mark()
        deadline = time.monotonic() + _WAIT_MS / 1000
        while listener.poll(1.0) != marker:
            assert time.monotonic() < deadline, "the next status does not arrive"
        with contextlib.suppress(msgspec.DecodeError):
            msgspec.json.decode(data, type=LearnerStatus)
            return True
        return False

    def close() -> None:
        listener.close()
        context.destroy(linger=0)

    return Target(check, [msgspec.json.encode(STATUS)], either(mutate_json), close=close)


def announcements(directory: Path) -> Target:
    """Hints that another version is live: whatever they say, the pointer file is the truth."""
    endpoint = Endpoint(f"ipc://{directory}/versions.sock")
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind(endpoint.address)
    pointer = directory / "CURRENT"
    watcher = VersionWatcher(directory, endpoint, LINEAGE, reread_seconds=0.0)
    sequence = 0

    def check(data: bytes) -> bool:
        nonlocal sequence
        sequence += 1
        live = msgspec.structs.replace(POINTER, sequence=sequence)
        pointer.write_bytes(msgspec.json.encode(live))
        publisher.send_multipart(unpack(data) or [b""])
        assert watcher.poll(0.005) == live
        assert watcher.poll() is None
        return True

    def close() -> None:
        watcher.close()
        context.destroy(linger=0)

    return Target(check, [pack([msgspec.msgpack.encode(POINTER)])], either(mutate_msgpack),
                  examples=60, close=close)  # fmt: skip


MESSAGES = {
    "wire": feedback_wire,
    "receiver": feedback_receiver,
    "relay-wire": relay_messages,
    "relay-pipe": relay_pipe,
    "control": control_desk,
    "status": status_stream,
    "announcements": announcements,
}
