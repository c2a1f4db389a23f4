"""Records on the wire: a MessagePack header and raw little-endian buffers, one ZeroMQ frame each.

Only numbers and bytes are read, nothing is executed. Every size follows from counts in the header,
whose limits are checked first; a buffer of any other size is refused. Tensors are views of the
frames on both sides, so neither sending nor receiving copies them.
"""

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from adaspec.feedback.record import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    HiddenTeacher,
    Outcome,
    Record,
    RollbackCause,
    RollbackRecord,
    Teacher,
    TeacherRows,
    TopKTeacher,
)

WIRE_FORMAT: Literal[1] = 1
MAX_FRAME_BYTES = 1 << 30
MAX_REASON = 1000  # characters

if sys.byteorder != "little":
    raise ImportError("feedback buffers are little-endian; this machine is not")

Buffer = bytes | bytearray | memoryview

_Identifier = Annotated[str, Meta(min_length=1, max_length=256)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Position = Annotated[int, Meta(ge=0, le=1 << 24)]
_Rows = Annotated[int, Meta(ge=1, le=1 << 20)]
_Width = Annotated[int, Meta(ge=1, le=1 << 20)]
_Steps = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=1024)], ...], Meta(min_length=1, max_length=4096)
]
_FloatName = Literal["float32", "bfloat16", "float16"]
_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class MalformedRecordError(ValueError):
    """A message that is not a record of this wire format."""


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wire: Literal[1] = WIRE_FORMAT
    lineage: _Identifier


class _RequestHeader(_Header, frozen=True, kw_only=True):
    request: _Identifier
    number: _Number


class _ContextHeader(_RequestHeader, frozen=True, kw_only=True, tag="context"):
    version: _Number
    start: _Position
    rows: _Rows
    tap_width: _Width
    tap_dtype: _FloatName


class _BlockHeader(_RequestHeader, frozen=True, kw_only=True, tag="block"):
    version: _Number
    start: _Position
    temperature: Annotated[float, Meta(ge=0.0)]
    verify_lengths: _Steps
    accepted: _Steps
    tap_width: _Width
    tap_dtype: _FloatName
    teacher: Literal["hidden", "top-k"]
    teacher_rows: TeacherRows
    teacher_width: _Width
    teacher_dtype: _FloatName


class _EndHeader(_RequestHeader, frozen=True, kw_only=True, tag="end"):
    length: _Position
    outcome: Outcome


class _RollbackHeader(_Header, frozen=True, kw_only=True, tag="rollback"):
    version: _Number
    restored: _Number
    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    cause: RollbackCause


_decoder = msgspec.msgpack.Decoder(_ContextHeader | _BlockHeader | _EndHeader | _RollbackHeader)
_encoder = msgspec.msgpack.Encoder()


def encode(record: Record) -> list[Buffer]:
    """Frames of a record; buffers are views of its tensors, which must not change until sent.

    Args:
        record: tensors on the CPU, of the types its class documents.
    """
    if isinstance(record, EndRecord):
        header = _EndHeader(
            lineage=record.lineage,
            request=record.request,
            number=record.number,
            length=record.length,
            outcome=record.outcome,
        )
        return [_encoder.encode(header)]
    if isinstance(record, RollbackRecord):
        rollback = _RollbackHeader(
            lineage=record.lineage,
            version=record.version,
            restored=record.restored,
            reason=record.reason[:MAX_REASON],
            cause=record.cause,
        )
        return [_encoder.encode(rollback)]
    if isinstance(record, ContextRecord):
        context = _ContextHeader(
            lineage=record.lineage,
            request=record.request,
            number=record.number,
            version=record.version,
            start=record.start,
            rows=record.taps.shape[0],
            tap_width=record.taps.shape[1],
            tap_dtype=_dtype_name(record.taps),
        )
        return [_encoder.encode(context), _bytes(record.token_ids), _bytes(record.taps)]
    teacher = record.teacher
    values = teacher.states if isinstance(teacher, HiddenTeacher) else teacher.logits
    block = _BlockHeader(
        lineage=record.lineage,
        request=record.request,
        number=record.number,
        version=record.version,
        start=record.start,
        temperature=record.temperature,
        verify_lengths=record.verify_lengths,
        accepted=record.accepted,
        tap_width=record.taps.shape[1],
        tap_dtype=_dtype_name(record.taps),
        teacher="hidden" if isinstance(teacher, HiddenTeacher) else "top-k",
        teacher_rows=record.teacher_rows,
        teacher_width=values.shape[1],
        teacher_dtype=_dtype_name(values),
    )
    frames: list[Buffer] = [
        _encoder.encode(block),
        _bytes(record.token_ids),
        _bytes(record.drafts),
        _bytes(record.taps),
        _bytes(values),
    ]
    if isinstance(teacher, TopKTeacher):
        frames += [_bytes(teacher.token_ids), _bytes(teacher.logsumexp)]
    return frames


def decode(frames: Sequence[Buffer]) -> Record:
    """The record in a message; tensors are views of the frames.

    Raises:
        MalformedRecordError: whatever the bytes are, nothing else is raised.
    """
    if not frames:
        raise MalformedRecordError("the message has no frames")
    try:
        header = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRecordError(f"the header is not valid: {error}") from None
    reader = _FrameReader(frames[1:])
    record: Record
    if isinstance(header, _EndHeader):
        record = EndRecord(
            header.lineage, header.request, header.number, header.length, header.outcome
        )
    elif isinstance(header, _RollbackHeader):
        record = RollbackRecord(
            header.lineage, header.version, header.restored, header.reason, header.cause
        )
    elif isinstance(header, _ContextHeader):
        record = ContextRecord(
            header.lineage,
            header.request,
            header.number,
            header.version,
            header.start,
            reader.token_ids(header.start + header.rows),
            reader.floats(header.tap_dtype, header.rows, header.tap_width),
        )
    else:
        record = _decode_block(header, reader)
    reader.expect_end()
    return record


def _decode_block(header: _BlockHeader, reader: "_FrameReader") -> BlockRecord:
    if len(header.verify_lengths) != len(header.accepted):
        raise MalformedRecordError("verify_lengths and accepted differ in length")
    if any(a >= v for v, a in zip(header.verify_lengths, header.accepted, strict=True)):
        raise MalformedRecordError("a step accepts as many tokens as it verifies, or more")
    if math.isinf(header.temperature):
        raise MalformedRecordError("the temperature is infinite")
    verified = sum(header.verify_lengths)
    committed = sum(header.accepted) + len(header.accepted)
    token_ids = reader.token_ids(committed + 1)
    drafts = reader.token_ids(verified - len(header.verify_lengths))
    taps = reader.floats(header.tap_dtype, committed, header.tap_width)
    rows = committed if header.teacher_rows == "committed" else verified
    values = reader.floats(header.teacher_dtype, rows, header.teacher_width)
    teacher: Teacher
    if header.teacher == "hidden":
        teacher = HiddenTeacher(values)
    else:
        ids = reader.token_ids(rows * header.teacher_width).view(rows, header.teacher_width)
        teacher = TopKTeacher(values, ids, reader.floats("float32", rows, 1).squeeze(1))
    record = BlockRecord(
        header.lineage,
        header.request,
        header.number,
        header.version,
        header.start,
        header.temperature,
        header.verify_lengths,
        header.accepted,
        token_ids,
        drafts,
        taps,
        teacher,
        header.teacher_rows,
    )
    for anchor, _, accepted, step_drafts in record.steps():
        first = anchor - record.start + 1
        if not torch.equal(token_ids[first : first + accepted], step_drafts[:accepted]):
            raise MalformedRecordError("the committed tokens are not the accepted drafts")
    return record


class _FrameReader:
    """Takes the buffers of a message in order and gives them the shape the header promises."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = list(reversed(frames))

    def token_ids(self, count: int) -> Tensor:
        ids = self._take(torch.int32, count)
        if count and int(ids.min()) < 0:
            raise MalformedRecordError("a token id is negative")
        return ids

    def floats(self, dtype: str, rows: int, width: int) -> Tensor:
        return self._take(_DTYPES[dtype], rows * width).view(rows, width)

    def expect_end(self) -> None:
        if self._frames:
            raise MalformedRecordError(f"{len(self._frames)} frames too many")

    def _take(self, dtype: torch.dtype, count: int) -> Tensor:
        if not self._frames:
            raise MalformedRecordError("a buffer is missing")
        frame = self._frames.pop()
        found, expected = memoryview(frame).nbytes, count * dtype.itemsize
        if found != expected:
            raise MalformedRecordError(f"a buffer has {found} bytes instead of {expected}")
        if count == 0:
            return torch.empty(0, dtype=dtype)
        # PyTorch warns about read-only memory, which bytes are; received frames are writable.
        writable = bytearray(frame) if memoryview(frame).readonly else frame
        return torch.frombuffer(writable, dtype=dtype)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _dtype_name(tensor: Tensor) -> _FloatName:
    name: _FloatName = msgspec.convert(str(tensor.dtype).removeprefix("torch."), _FloatName)
    return name
