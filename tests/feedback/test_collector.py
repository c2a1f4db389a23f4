"""The collector must give back, request by request, exactly what the batches held."""

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndCapture,
    Endpoint,
    EndRecord,
    FeedbackCollector,
    FeedbackReceiver,
    FeedbackSender,
    HiddenTeacher,
    PrefillCapture,
    Record,
    StepCapture,
    open_channel,
)
from tests.feedback.records import LINEAGE

WIDTH, TAPS, HIDDEN = 4, 6, 3


class Stream:
    def __init__(self, endpoint: Endpoint, **options: object) -> None:
        self.receiver = FeedbackReceiver(endpoint, LINEAGE)
        self.collector = FeedbackCollector(FeedbackSender(endpoint), LINEAGE, **options)

    def until_end_of(self, *requests: str) -> dict[str, list[Record]]:
        records: dict[str, list[Record]] = {}
        open_requests = set(requests)
        deadline = time.monotonic() + 20
        while open_requests and time.monotonic() < deadline:
            record = self.receiver.receive(0.1)
            if record is not None:
                records.setdefault(record.request, []).append(record)
                if isinstance(record, EndRecord):
                    open_requests.discard(record.request)
        assert not open_requests
        return records

    def close(self) -> None:
        self.collector.close()
        self.receiver.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return open_channel(tmp_path / "channel").feedback


@pytest.fixture
def stream(endpoint: Endpoint) -> Iterator[Stream]:
    stream = Stream(endpoint, steps_per_record=2)
    yield stream
    stream.close()


def step(
    requests: list[str], anchors: list[int], accepted: list[int], version: int = 0
) -> StepCapture:
    count = len(requests)
    return StepCapture(
        requests,
        version,
        [0.0] * count,
        torch.tensor(anchors),
        torch.randint(0, 90, (count, WIDTH)),
        torch.tensor(accepted),
        torch.randint(0, 90, (count,)),
        torch.randn(count, WIDTH, TAPS),
        HiddenTeacher(torch.randn(count * WIDTH, HIDDEN)),
    )


def chained(first: StepCapture, second: StepCapture) -> StepCapture:
    """The second step, with its anchors those that the first has committed."""
    tokens = second.tokens.clone()
    tokens[:, 0] = first.bonus
    return replace(second, tokens=tokens, anchors=first.anchors + first.accepted + 1)


def test_the_memory_of_a_batch_is_let_go_before_its_steps_are_joined(stream: Stream) -> None:
    taps, states = np.ones((2, WIDTH, TAPS), "f4"), np.ones((2 * WIDTH, HIDDEN), "f4")
    held = [weakref.ref(taps), weakref.ref(states)]
    first = replace(
        step(["a", "b"], [1, 1], [2, 0]),
        taps=torch.from_numpy(taps),
        teacher=HiddenTeacher(torch.from_numpy(states)),
    )
    del taps, states
    prompts = PrefillCapture(["a", "b"], 0, [[1], [2]], [0, 0], torch.randn(2, TAPS))
    for capture in (prompts, first, EndCapture("b", 3)):
        stream.collector.submit(capture)
    del first, capture
    assert len(stream.until_end_of("b")["b"]) == 3
    assert all(reference() is None for reference in held)
    stream.collector.submit(EndCapture("a", 5))
    assert len(stream.until_end_of("a")["a"]) == 2


def test_batches_become_records_of_single_requests(stream: Stream) -> None:
    torch.manual_seed(0)
    taps = torch.randn(5, TAPS)
    stream.collector.submit(PrefillCapture(["a", "b"], 0, [[1, 2, 3], [4, 5, 6, 7]], [0, 2], taps))
    first = step(["a", "b"], [3, 4], [2, 0])
    second = chained(first, step(["a", "b"], [0, 0], [3, 1]))
    third = chained(second, step(["a", "b"], [0, 0], [0, 0]))
    for capture in (first, second, third):
        stream.collector.submit(capture)
    stream.collector.submit(EndCapture("a", 11))
    stream.collector.submit(EndCapture("b", 8, "aborted"))
    records = stream.until_end_of("a", "b")

    for i, request in enumerate("ab"):
        kinds = [type(record) for record in records[request]]
        assert kinds == [ContextRecord, BlockRecord, BlockRecord, EndRecord]
        assert [record.number for record in records[request]] == [0, 1, 2, 3]
        _, block, rest, _ = records[request]
        a, b = (int(capture.accepted[i]) for capture in (first, second))
        assert block.start == first.anchors[i]
        assert block.verify_lengths == (WIDTH, WIDTH)
        assert block.accepted == (a, b)
        assert rest.accepted == (0,)
        assert rest.start == third.anchors[i]
        committed = torch.cat(
            [first.tokens[i, : a + 1], second.tokens[i, : b + 1], second.bonus[i : i + 1]]
        )
        assert block.token_ids.tolist() == committed.tolist()
        assert block.drafts.tolist() == (
            first.tokens[i, 1:].tolist() + second.tokens[i, 1:].tolist()
        )
        assert torch.equal(block.taps, torch.cat([first.taps[i, : a + 1], second.taps[i, : b + 1]]))
        rows = i * WIDTH
        states = [
            capture.teacher.states[rows : rows + n + 1] for capture, n in ((first, a), (second, b))
        ]
        assert torch.equal(block.teacher.states, torch.cat(states))
    assert torch.equal(records["a"][0].taps, taps[:3])
    assert torch.equal(records["b"][0].taps, taps[3:])
    assert records["b"][0].token_ids.tolist() == [4, 5, 6, 7]
    assert records["b"][-1].outcome == "aborted"


def test_a_new_version_starts_a_new_record(endpoint: Endpoint) -> None:
    stream = Stream(endpoint, steps_per_record=100)
    stream.collector.submit(PrefillCapture(["a"], 0, [[1, 2]], [0], torch.randn(2, TAPS)))
    first = step(["a"], [2], [1])
    second = chained(first, step(["a"], [0], [0], version=1))
    stream.collector.submit(first)
    stream.collector.submit(second)
    stream.collector.submit(EndCapture("a", 6))
    records = stream.until_end_of("a")["a"]
    assert [getattr(record, "version", None) for record in records] == [0, 0, 1, None]
    stream.close()


def test_verified_rows_can_be_sent_too(endpoint: Endpoint) -> None:
    stream = Stream(endpoint, teacher_rows="verified")
    stream.collector.submit(PrefillCapture(["a"], 0, [[1, 2]], [0], torch.randn(2, TAPS)))
    capture = replace(step(["a"], [2], [1]), verify_lengths=torch.tensor([3]))
    stream.collector.submit(capture)
    stream.collector.submit(EndCapture("a", 5))
    block = stream.until_end_of("a")["a"][1]
    assert block.teacher_rows == "verified"
    assert block.verify_lengths == (3,)
    assert torch.equal(block.teacher.states, capture.teacher.states[:3])
    assert block.drafts.tolist() == capture.tokens[0, 1:3].tolist()
    stream.close()


def test_steps_without_a_captured_prefill_are_ignored(stream: Stream) -> None:
    stream.collector.submit(step(["unknown"], [5], [1]))
    stream.collector.submit(EndCapture("unknown", 8))
    stream.collector.submit(PrefillCapture(["a"], 0, [[1]], [0], torch.randn(1, TAPS)))
    stream.collector.submit(EndCapture("a", 1))
    assert set(stream.until_end_of("a")) == {"a"}


def test_captures_wait_for_their_copies(stream: Stream) -> None:
    taps = torch.zeros(1, TAPS)

    def finish_copy() -> None:
        taps.fill_(7.0)

    stream.collector.submit(PrefillCapture(["a"], 0, [[1]], [0], taps, wait=finish_copy))
    stream.collector.submit(EndCapture("a", 1))
    assert bool((stream.until_end_of("a")["a"][0].taps == 7.0).all())


def test_what_follows_a_lost_capture_is_ignored(stream: Stream) -> None:
    stream.collector.submit(PrefillCapture(["a", "b"], 0, [[1], [2]], [0, 0], torch.randn(2, TAPS)))
    stream.collector.forget(["a", "never seen"])
    stream.collector.submit(step(["a", "b"], [1, 1], [1, 1]))
    stream.collector.submit(EndCapture("a", 4))
    stream.collector.submit(EndCapture("b", 4))
    records = stream.until_end_of("b")
    assert [type(record) for record in records["a"]] == [ContextRecord]
    assert len(records["b"]) == 3
