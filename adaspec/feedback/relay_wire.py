"""Captures on their way to the relay process: a MessagePack header and one frame per tensor.

Both ends are ours, a parent and its child over a socket that only their user can open; still,
nothing is executed, and what cannot be read is refused.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from adaspec.feedback.captures import Capture, EndCapture, PrefillCapture, StepCapture
from adaspec.feedback.record import (
    HiddenTeacher,
    Outcome,
    RollbackCause,
    Teacher,
    TopKTeacher,
)

Frame = bytes | memoryview

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)
}


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    """A message for the learner; see `RollbackRecord`."""

    version: int
    restored: int
    reason: str
    cause: RollbackCause


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Captures of these requests gave way."""

    requests: list[str]


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]


class _Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    requests: list[str]
    version: int
    token_ids: list[list[int]]
    starts: list[int]
    tensors: list[_Shape]


class _Step(msgspec.Struct, frozen=True, tag="step"):
    requests: list[str]
    version: int
    temperatures: list[float]
    is_ragged: bool
    tensors: list[_Shape]


class _End(msgspec.Struct, frozen=True, tag="end"):
    request: str
    length: int
    outcome: Outcome


Message = Capture | Rollback | Lost

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Prefill | _Step | _End | Rollback | Lost)


def tensors_of(message: Message) -> list[Tensor]:
    """The tensors that travel with a message, in the order of their frames."""
    match message:
        case PrefillCapture():
            return [message.taps]
        case StepCapture():
            lengths = [] if message.verify_lengths is None else [message.verify_lengths]
            whole = [message.anchors, message.tokens, message.accepted, message.bonus, message.taps]
            return [*whole, *lengths, *message.teacher.tensors()]
        case _:
            return []


def encode(message: Message) -> list[Frame]:
    """Frames of a message; buffers are views of its tensors, which must not change until sent."""
    tensors = [tensor.contiguous() for tensor in tensors_of(message)]
    shapes = [_Shape(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    header: msgspec.Struct
    match message:
        case PrefillCapture():
            token_ids = [list(ids) for ids in message.token_ids]
            header = _Prefill(
                list(message.requests), message.version, token_ids, list(message.starts), shapes
            )
        case StepCapture():
            header = _Step(
                list(message.requests),
                message.version,
                list(message.temperatures),
                message.verify_lengths is not None,
                shapes,
            )
        case EndCapture():
            header = _End(message.request, message.length, message.outcome)
        case _:
            header = message
    buffers = [t.detach().view(-1).view(torch.uint8).numpy().data for t in tensors]
    return [_encoder.encode(header), *buffers]


def decode(frames: Sequence[Frame]) -> Message:
    """The message in the frames; tensors are views of them.

    Raises:
        ValueError: if they are not such a message.
    """
    header = _decoder.decode(frames[0])
    if isinstance(header, Rollback | Lost):
        return header
    if isinstance(header, _End):
        return EndCapture(header.request, header.length, header.outcome)
    if len(frames) != len(header.tensors) + 1:
        raise ValueError(f"{len(frames) - 1} tensors came instead of {len(header.tensors)}")
    tensors = [
        torch.frombuffer(frame, dtype=_DTYPES[shape.dtype]).view(shape.shape)
        for frame, shape in zip(frames[1:], header.tensors, strict=True)
    ]
    if isinstance(header, _Prefill):
        return PrefillCapture(
            header.requests, header.version, header.token_ids, header.starts, tensors[0]
        )
    anchors, tokens, accepted, bonus, taps, *rest = tensors
    lengths = rest.pop(0) if header.is_ragged else None
    teacher: Teacher = HiddenTeacher(*rest) if len(rest) == 1 else TopKTeacher(*rest)
    return StepCapture(
        requests=header.requests,
        version=header.version,
        temperatures=header.temperatures,
        anchors=anchors,
        tokens=tokens,
        accepted=accepted,
        bonus=bonus,
        taps=taps,
        teacher=teacher,
        verify_lengths=lengths,
    )
