from dataclasses import replace

import numpy as np
import pytest
import torch

from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import BlockRecord, ContextRecord, EndRecord, Record, TopKTeacher
from online.assembly import Assembler
from online.batch import sample_blocks
from online.config import BatchSection, IntakeSection
from online.target import TargetMatrices
from online.trajectory import Trajectory
from tests.online.world import DRAFTER, Request, TinyTarget, captures, records_of, teacher_of


def feed(assembler: Assembler, records: list[Record]) -> list[Trajectory]:
    return [trajectory for record in records for trajectory in assembler.add(record)]


def assert_exact(trajectory: Trajectory, request: Request) -> None:
    rows = trajectory.rows
    assert torch.equal(trajectory.tokens, request.tokens[: len(trajectory.tokens)])
    assert torch.equal(trajectory.taps, request.taps[:rows])
    assert trajectory.prompt_length == request.prompt_length
    responded = torch.arange(request.prompt_length, rows)
    assert torch.equal(trajectory.teacher_tokens, request.logits[responded].argmax(-1))
    assert len(trajectory.teacher) == len(responded)
    if isinstance(trajectory.teacher, TopKTeacher):
        expected = teacher_of(request, "top-k", responded)
        assert torch.equal(trajectory.teacher.logits, expected.logits)
        assert torch.equal(trajectory.teacher.logsumexp, expected.logsumexp)
    else:
        assert torch.equal(trajectory.teacher.states, request.hidden[responded])


@pytest.mark.parametrize("kind", ["top-k", "hidden"])
@pytest.mark.parametrize("teacher_rows", ["committed", "verified"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_request_is_rebuilt_exactly(
    assembler: Assembler,
    requests: list[Request],
    drafter: BlockDrafter,
    target: TinyTarget,
    kind: str,
    teacher_rows: str,
    chunk: int | None,
) -> None:
    request = requests[0]
    made = captures(request, drafter, target, kind, chunk=chunk)
    records = records_of(made, teacher_rows=teacher_rows, steps_per_record=3)
    (trajectory,) = feed(assembler, records)
    assert_exact(trajectory, request)
    assert len(trajectory.tokens) == trajectory.rows + 1
    steps = [capture for capture in made if hasattr(capture, "accepted")]
    assert [(b.anchor, b.accepted) for b in trajectory.blocks] == [
        (int(step.anchors[0]), int(step.accepted[0])) for step in steps
    ]
    assert assembler.counters == {"completed": 1}


def test_interleaved_requests_do_not_mix(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    streams = [records_of(captures(r, drafter, target), steps_per_record=1) for r in requests[:3]]
    longest = max(map(len, streams))
    mixed = [stream[i] for i in range(longest) for stream in streams if i < len(stream)]
    finished = {trajectory.request: trajectory for trajectory in feed(assembler, mixed)}
    for request in requests[:3]:
        assert_exact(finished[request.name], request)


@pytest.mark.parametrize("cached", [1, 15, 16, 17, 30])
def test_a_cached_prefix_is_supplied_by_an_earlier_request(
    assembler: Assembler,
    target: TinyTarget,
    requests: list[Request],
    drafter: BlockDrafter,
    cached: int,
) -> None:
    """Also one that ends inside the earlier request's response, as in a second turn."""
    first = requests[0]
    feed(assembler, records_of(captures(first, drafter, target)))
    prompt = [*first.tokens[:cached].tolist(), 3, 1, 4]
    second = target.request("second", prompt)
    # Bit for bit what the server's cache holds is what the first request computed.
    second.taps[:cached] = first.taps[:cached]
    (trajectory,) = feed(assembler, records_of(captures(second, drafter, target, cached=cached)))
    assert_exact(trajectory, second)


def test_a_request_with_an_unknown_prefix_is_dropped_and_counted(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    records = records_of(captures(requests[0], drafter, target, cached=3))
    assert feed(assembler, records) == []
    assert assembler.counters["unknown-prefixes"] == 1
    assert assembler.counters["orphans"] == len(records) - 1


def test_what_came_before_a_gap_is_kept(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    records = records_of(captures(requests[0], drafter, target), steps_per_record=1)
    (trajectory,) = feed(assembler, records[:4] + records[5:])
    assert_exact(trajectory, requests[0])
    assert len(trajectory.blocks) == 3
    assert assembler.counters["gaps"] == 1


def test_tokens_that_were_not_delivered_are_cut_off(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    records = records_of(captures(requests[0], drafter, target))
    length = requests[0].prompt_length + 7
    records[-1] = replace(records[-1], length=length)
    (trajectory,) = feed(assembler, records)
    assert_exact(trajectory, requests[0])
    assert (len(trajectory.tokens), trajectory.rows) == (length, length)
    assert all(block.anchor < length for block in trajectory.blocks)


def damaged(record: Record, how: str) -> Record:
    assert isinstance(record, BlockRecord)
    taps = record.taps.clone()
    if how == "nan":
        taps[0, 0] = float("nan")
        return replace(record, taps=taps)
    if how == "width":
        return replace(record, taps=taps[:, :-1])
    if how == "type":
        return replace(record, taps=taps.bfloat16())
    if how == "vocabulary":
        return replace(record, token_ids=record.token_ids + 48)
    if how == "position":
        return replace(record, start=record.start + 1)
    if how == "anchor":
        return replace(record, token_ids=(record.token_ids + 1) % 40)
    assert isinstance(record.teacher, TopKTeacher)
    if how == "huge":
        return replace(record, taps=torch.full_like(record.taps, -1e30))
    if how == "teacher huge":
        logsumexp = torch.full_like(record.teacher.logsumexp, 3e38)
        return replace(record, teacher=replace(record.teacher, logsumexp=logsumexp))
    if how == "teacher nan":
        logits = torch.full_like(record.teacher.logits, float("nan"))
        return replace(record, teacher=replace(record.teacher, logits=logits))
    narrow = TopKTeacher(
        record.teacher.logits[:, :2], record.teacher.token_ids[:, :2], record.teacher.logsumexp
    )
    return replace(record, teacher=narrow)


@pytest.mark.parametrize(
    "how",
    [
        *("nan", "huge", "width", "type", "vocabulary", "position", "anchor"),
        *("teacher nan", "teacher huge", "teacher width"),
    ],
)
def test_a_record_that_contradicts_is_not_used(
    assembler: Assembler,
    requests: list[Request],
    drafter: BlockDrafter,
    target: TinyTarget,
    how: str,
) -> None:
    records = records_of(captures(requests[0], drafter, target), steps_per_record=1)
    records[3] = damaged(records[3], how)
    (trajectory,) = feed(assembler, records)
    assert_exact(trajectory, requests[0])
    assert len(trajectory.blocks) == 2
    assert assembler.counters["misfits"] == 1


def test_a_retracted_request_ends_where_it_was(
    assembler: Assembler, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    request = requests[0]
    made = captures(request, drafter, target)
    anchor = int(made[3].anchors[0])
    again = replace(
        made[0], token_ids=[request.tokens[: anchor + 1].tolist()], taps=request.taps[: anchor + 1]
    )
    records = records_of([*made[:3], again, *made[3:]])
    (trajectory,) = feed(assembler, records)
    assert_exact(trajectory, request)
    assert trajectory.rows == anchor
    assert assembler.counters["restarted"] == 1


def test_open_requests_are_bounded_in_memory(
    matrices: TargetMatrices, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    open_bytes = 3 * requests[0].taps[:30].nbytes
    assembler = Assembler(IntakeSection(open_bytes=open_bytes), DRAFTER, matrices)
    for request in requests:
        feed(assembler, records_of(captures(request, drafter, target))[:-1])  # never ends
    assert assembler.counters["evicted"] >= len(requests) - 4 > 0
    assert assembler._open_bytes <= open_bytes


def test_a_response_behind_the_longest_context_is_counted_and_left_out(
    matrices: TargetMatrices, requests: list[Request], drafter: BlockDrafter, target: TinyTarget
) -> None:
    length = requests[0].prompt_length
    for max_context, used in ((length, 0), (length + 1, 1)):
        assembler = Assembler(IntakeSection(), DRAFTER, matrices, max_context)
        found = feed(assembler, records_of(captures(requests[0], drafter, target)))
        assert len(found) == used
        assert assembler.counters["too-long"] == 1 - used
        config = BatchSection(max_context=max_context)
        for trajectory in found:
            rng = np.random.default_rng(0)
            assert sample_blocks(trajectory, config, DRAFTER.block_size, 7.0, rng).tokens > 0


def test_records_of_unknown_requests_are_counted(assembler: Assembler) -> None:
    assert assembler.add(EndRecord("l", "never seen", 4, 9, "finished")) == []
    assert assembler.counters == {"orphans": 1}


def test_a_context_for_another_drafter_is_refused(assembler: Assembler) -> None:
    record = ContextRecord("l", "r", 0, 0, 0, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3))
    assert assembler.add(record) == []
    assert assembler.counters == {"misfits": 1}


def test_states_become_the_largest_logits_once(
    requests: list[Request], drafter: BlockDrafter, target: TinyTarget, matrices: TargetMatrices
) -> None:
    made = captures(requests[0], drafter, target, "hidden")
    (trajectory,) = feed(Assembler(IntakeSection(top_k=8), DRAFTER, matrices), records_of(made))
    assert isinstance(trajectory.teacher, TopKTeacher)
    responded = torch.arange(requests[0].prompt_length, trajectory.rows)
    expected = teacher_of(requests[0], "top-k", responded)
    assert torch.equal(trajectory.teacher.token_ids, expected.token_ids)
    torch.testing.assert_close(trajectory.teacher.logits, expected.logits)
    assert torch.equal(trajectory.teacher_tokens, requests[0].logits[responded].argmax(-1))
