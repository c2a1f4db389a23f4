"""Captures on their way to the relay process: a MessagePack header and frames of tensor bytes.

Tensors that lie in one piece of memory, as a copy from a device does, travel as one frame.

Both ends are ours, a parent and its child over a socket that only their user can open; still,
nothing is executed, and what cannot be read is refused.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
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

_Name = Literal["int32", "int64", "float32", "bfloat16", "float16"]
_DTYPES: dict[_Name, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Three sizes of at most this have a product that fits 64 bits, as PyTorch needs.
_Size = Annotated[int, Meta(ge=0, le=1 << 20)]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Rollback(_Header, frozen=True, tag="rollback"):
    """A message for the learner; see `RollbackRecord`."""

    version: int
    restored: int
    reason: str
    cause: RollbackCause


class Lost(_Header, frozen=True, tag="lost"):
    """Captures of these requests gave way."""

    requests: list[str]


class _Place(_Header, frozen=True, array_like=True):
    """Where a tensor lies: which frame after the header, and at which byte of it."""

    dtype: _Name
    shape: Annotated[list[_Size], Meta(max_length=3)]
    frame: Annotated[int, Meta(ge=0)]
    start: Annotated[int, Meta(ge=0)]


class _Prefill(_Header, frozen=True, tag="prefill"):
    requests: list[str]
    version: int
    token_ids: list[list[int]]
    starts: list[int]
    tensors: list[_Place]


class _Step(_Header, frozen=True, tag="step"):
    requests: list[str]
    version: int
    temperatures: list[float]
    is_ragged: bool
    tensors: list[_Place]


class _End(_Header, frozen=True, tag="end"):
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
    places, buffers = _lay_out([tensor.contiguous() for tensor in tensors_of(message)])
    header: msgspec.Struct
    match message:
        case PrefillCapture():
            token_ids = [list(ids) for ids in message.token_ids]
            header = _Prefill(
                list(message.requests), message.version, token_ids, list(message.starts), places
            )
        case StepCapture():
            header = _Step(
                list(message.requests),
                message.version,
                list(message.temperatures),
                message.verify_lengths is not None,
                places,
            )
        case EndCapture():
            header = _End(message.request, message.length, message.outcome)
        case _:
            header = message
    return [_encoder.encode(header), *buffers]


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[_Place], list[memoryview]]:
    """Where each tensor lies in which frame, and the frames."""
    if len(tensors) > 1:
        piece = tensors[0].untyped_storage()
        base, end = piece.data_ptr(), piece.data_ptr() + piece.nbytes()
        pointers = [tensor.data_ptr() for tensor in tensors]
        inside = all(base <= pointer < end for pointer in pointers)
        if inside and sum(tensor.nbytes for tensor in tensors) == piece.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(piece)
            places = [_place(t, 0, p - base) for t, p in zip(tensors, pointers, strict=True)]
            return places, [whole.numpy().data]
    frames = [t.detach().view(-1).view(torch.uint8).numpy().data for t in tensors]
    return [_place(tensor, frame, 0) for frame, tensor in enumerate(tensors)], frames


def _place(tensor: Tensor, frame: int, start: int) -> _Place:
    return _Place(_NAMES[tensor.dtype], list(tensor.shape), frame, start)


def decode(frames: Sequence[Frame]) -> Message:
    """The message in the frames; tensors are views of them.

    Raises:
        ValueError: if they are not such a message.
    """
    if not frames:
        raise ValueError("the message has no frames")
    header = _decoder.decode(frames[0])
    if isinstance(header, Rollback | Lost):
        return header
    if isinstance(header, _End):
        return EndCapture(header.request, header.length, header.outcome)
    tensors = [_read(place, frames[1:]) for place in header.tensors]
    if isinstance(header, _Prefill):
        if len(tensors) != 1:
            raise ValueError(f"{len(tensors)} tensors came with a prefill, which has one")
        return PrefillCapture(
            header.requests, header.version, header.token_ids, header.starts, tensors[0]
        )
    if len(tensors) - header.is_ragged not in (6, 8):  # a teacher is of one tensor or of three
        raise ValueError(f"{len(tensors)} tensors came with a step, which has another number")
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


def _read(place: _Place, frames: Sequence[Frame]) -> Tensor:
    if place.frame >= len(frames):
        raise ValueError(f"{len(frames)} frames came, and a tensor lies in frame {place.frame}")
    frame, dtype = frames[place.frame], _DTYPES[place.dtype]
    end = place.start + math.prod(place.shape) * dtype.itemsize
    if end > len(frame):
        raise ValueError(f"a tensor lies beyond the {len(frame)} bytes of its frame")
    if place.start == end:
        return torch.empty(place.shape, dtype=dtype)
    count = math.prod(place.shape)
    return torch.frombuffer(frame, dtype=dtype, count=count, offset=place.start).view(place.shape)
