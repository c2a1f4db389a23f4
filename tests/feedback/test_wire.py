from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaspec.feedback import MalformedRecordError
from adaspec.feedback.wire import decode, encode
from tests.feedback.records import LINEAGE, all_kinds, block_record, context_record, same


def as_bytes(frames: list) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("kind", range(6))
def test_a_record_survives_the_wire_bit_for_bit(kind: int) -> None:
    torch.manual_seed(kind)
    record = all_kinds()[kind]
    assert same(decode(as_bytes(encode(record))), record)


def test_plain_decoding_steps_have_no_drafts() -> None:
    record = replace(
        block_record(),
        verify_lengths=(1,),
        accepted=(0,),
        token_ids=torch.tensor([5, 6], dtype=torch.int32),
        drafts=torch.empty(0, dtype=torch.int32),
        taps=torch.randn(1, 6),
        teacher=block_record().teacher.select(slice(0, 1)),
    )
    assert same(decode(as_bytes(encode(record))), record)


def test_encoding_does_not_copy_tensors() -> None:
    record = context_record()
    frames = encode(record)
    record.taps.zero_()
    assert not any(bytes(frames[2]))


def test_rows_after_the_first_rejection_are_marked() -> None:
    record = block_record()
    assert record.right_context().tolist() == [True, True, True, False, True, False, False]
    teacher, kept = record.teacher, record.committed_teacher()
    assert torch.equal(kept.logits, teacher.logits[[0, 1, 2, 4]])


def test_steps_follow_one_another() -> None:
    steps = [(a, v, n, d.tolist()) for a, v, n, d in block_record().steps()]
    assert steps == [(4, 4, 2, [11, 12, 99]), (7, 3, 0, [98, 97])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": (3, 0)}, "bytes instead of"),
        ({"accepted": (4, 0)}, "accepts as many"),
        ({"verify_lengths": (4,)}, "differ in length"),
        ({"temperature": float("inf")}, "infinite"),
        ({"temperature": float("nan")}, "header is not valid"),
        ({"temperature": -1.0}, "header is not valid"),
        ({"start": -1}, "header is not valid"),
        ({"request": ""}, "header is not valid"),
        ({"token_ids": torch.tensor([10, 11, 50, 13, 14], dtype=torch.int32)}, "accepted drafts"),
        ({"drafts": torch.tensor([11, 12, 99, 98, -1], dtype=torch.int32)}, "negative"),
    ],
)
def test_inconsistent_block_records_are_refused(change: dict, message: str) -> None:
    record = replace(block_record(), **change)
    with pytest.raises(MalformedRecordError, match=message):
        decode(as_bytes(encode(record)))


@pytest.mark.parametrize("value", [2, "1", None])
def test_another_wire_format_is_refused(value: object) -> None:
    frames = as_bytes(encode(context_record()))
    header = msgspec.msgpack.decode(frames[0]) | {"wire": value}
    with pytest.raises(MalformedRecordError, match="header is not valid"):
        decode([msgspec.msgpack.encode(header), *frames[1:]])


def test_an_unknown_header_field_is_refused() -> None:
    frames = as_bytes(encode(context_record()))
    header = msgspec.msgpack.decode(frames[0]) | {"extra": 1}
    with pytest.raises(MalformedRecordError, match="extra"):
        decode([msgspec.msgpack.encode(header), *frames[1:]])


@pytest.mark.parametrize("frames", [[], [b""], [b"\x80"], [b"\xc1"]])
def test_messages_without_a_header_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedRecordError):
        decode(frames)


@given(kind=st.integers(0, 5), data=st.data())
def test_mutated_messages_decode_to_a_record_or_are_refused(kind: int, data: st.DataObject) -> None:
    """Whatever bytes come, the only exception is the one the receiver counts."""
    frames = as_bytes(encode(all_kinds()[kind]))
    operation = data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat", "swap"]))
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[which]
    if operation == "flip":
        position = data.draw(st.integers(0, max(0, len(frame) - 1)))
        value = data.draw(st.integers(0, 255))
        frames[which] = frame[:position] + bytes([value]) + frame[position + 1 :]
    elif operation == "cut":
        frames[which] = frame[: data.draw(st.integers(0, len(frame)))]
    elif operation == "grow":
        frames[which] = frame + data.draw(st.binary(min_size=1, max_size=16))
    elif operation == "drop":
        del frames[which]
    elif operation == "repeat":
        frames.insert(which, frame)
    else:
        other = data.draw(st.integers(0, len(frames) - 1))
        frames[which], frames[other] = frames[other], frames[which]
    try:
        record = decode(frames)
    except MalformedRecordError:
        return
    # What was accepted is a well-formed record: it goes over the wire again unchanged.
    assert len(encode(record)) == len(frames)


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_random_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedRecordError):
        decode(frames)


def test_lineage_is_carried() -> None:
    assert decode(as_bytes(encode(context_record()))).lineage == LINEAGE
