import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from adaspec.errors import AdaSpecError
from adaspec.feedback import (
    Endpoint,
    FeedbackReceiver,
    FeedbackSender,
    Record,
    RollbackRecord,
    in_share,
    open_channel,
)
from adaspec.feedback.sender import record_bytes
from adaspec.feedback.wire import MAX_REASON, encode
from tests.feedback.records import LINEAGE, all_kinds, block_record, context_record, same


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return open_channel(tmp_path / "channel").feedback


@pytest.fixture
def senders() -> Iterator[list[FeedbackSender]]:
    made: list[FeedbackSender] = []
    yield made
    for sender in made:
        sender.close()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def receive(receiver: FeedbackReceiver, count: int) -> list[Record]:
    records: list[Record] = []
    deadline = time.monotonic() + 20
    while len(records) < count and time.monotonic() < deadline:
        if (record := receiver.receive(0.1)) is not None:
            records.append(record)
    return records


def test_records_arrive_in_order_and_unchanged(endpoint: Endpoint, senders: list) -> None:
    receiver = FeedbackReceiver(endpoint, LINEAGE)
    sender = FeedbackSender(endpoint)
    senders.append(sender)
    sent = all_kinds()
    assert all(sender.offer(record) for record in sent)
    received = receive(receiver, len(sent))
    assert all(same(left, right) for left, right in zip(sent, received, strict=True))
    eventually(lambda: sender.stats().sent == len(sent))
    assert sender.stats().sent_bytes == sum(map(record_bytes, sent))
    assert receiver.stats().received == len(sent)
    receiver.close()


def test_malformed_and_foreign_messages_are_counted_and_skipped(endpoint: Endpoint) -> None:
    receiver = FeedbackReceiver(endpoint, LINEAGE)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(endpoint.address)
    good = context_record()
    for frames in ([b"junk"], encode(good)[:-1], encode(good)):
        socket.send_multipart(frames)
    assert len(receive(receiver, 1)) == 1
    stats = receiver.stats()
    assert (stats.received, stats.malformed, stats.foreign) == (3, 2, 0)
    receiver.close()

    receiver = FeedbackReceiver(endpoint, "another")
    socket.send_multipart(encode(good))
    eventually(lambda: receiver.receive(0.1) is None and receiver.stats().received == 1)
    assert receiver.stats().foreign == 1
    receiver.close()
    context.destroy(linger=0)


def test_without_a_learner_the_oldest_give_way(endpoint: Endpoint, senders: list) -> None:
    size = record_bytes(context_record())
    sender = FeedbackSender(endpoint, queue_bytes=3 * size)
    senders.append(sender)
    results = [sender.offer(context_record(request, number=1)) for request in "abcde"]
    assert all(results)
    stats = sender.stats()
    assert stats.dropped == {"queue-full": 2}
    assert (stats.queued, stats.queued_bytes, stats.sent) == (3, 3 * size, 0)
    # Requests that lost a record are done with; the others go on.
    assert [sender.wants(request) for request in "abcde"] == [False, False, True, True, True]
    assert not sender.offer(context_record("a", number=2))
    assert sender.stats().dropped == {"queue-full": 2, "gap": 1}


def test_new_requests_are_turned_away_under_pressure(endpoint: Endpoint, senders: list) -> None:
    size = record_bytes(context_record())
    sender = FeedbackSender(endpoint, queue_bytes=4 * size)
    senders.append(sender)
    for number in range(3):
        assert sender.offer(context_record("old", number))
    assert not sender.offer(context_record("new", 0))
    assert sender.offer(context_record("old", 3))
    assert sender.stats().dropped == {"pressure": 1}


def test_a_record_larger_than_the_queue_is_dropped(endpoint: Endpoint, senders: list) -> None:
    sender = FeedbackSender(endpoint, queue_bytes=8)
    senders.append(sender)
    assert not sender.offer(context_record())
    assert sender.stats().dropped == {"too-large": 1}


def test_the_stream_survives_a_learner_that_comes_late_and_restarts(
    endpoint: Endpoint, senders: list
) -> None:
    sender = FeedbackSender(endpoint)
    senders.append(sender)
    assert sender.offer(context_record("early"))
    first = FeedbackReceiver(endpoint, LINEAGE)
    assert [record.request for record in receive(first, 1)] == ["early"]
    first.close()
    second = FeedbackReceiver(endpoint, LINEAGE)
    seen: set[str] = set()
    for turn in range(200):  # what was on its way to the first learner may be lost
        sender.offer(context_record(f"late-{turn}"))
        if (record := second.receive(0.1)) is not None:
            seen.add(record.request)
            break
    assert seen
    second.close()


def test_the_byte_budget_is_kept(endpoint: Endpoint, senders: list) -> None:
    receiver = FeedbackReceiver(endpoint, LINEAGE)
    size = record_bytes(block_record())
    sender = FeedbackSender(endpoint, bytes_per_second=4 * size)
    senders.append(sender)
    start = time.monotonic()
    for number in range(9):
        sender.offer(block_record(number=number))
    assert len(receive(receiver, 9)) == 9
    # A burst of one second's worth is free; the other five records cost five quarters of a second.
    assert time.monotonic() - start >= 1.0
    receiver.close()


def test_closing_does_not_wait_for_a_learner(endpoint: Endpoint) -> None:
    script = (
        "import sys, torch\n"
        "from adaspec.feedback import Endpoint, EndRecord, FeedbackSender\n"
        f"sender = FeedbackSender(Endpoint({endpoint.address!r}))\n"
        "sender.offer(EndRecord('l', 'r', 0, 1, 'finished'))\n"
        "sender.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 0


def test_sampling_is_by_request_and_near_its_share(endpoint: Endpoint, senders: list) -> None:
    sender = FeedbackSender(endpoint, share=0.25)
    senders.append(sender)
    requests = [f"request-{i}" for i in range(2000)]
    wanted = [request for request in requests if sender.wants(request)]
    assert 400 < len(wanted) < 600
    assert wanted == [request for request in requests if sender.wants(request)]
    assert all(in_share(request, 0.5, "feedback") for request in wanted)
    held = [request for request in wanted if in_share(request, 0.5, "another purpose")]
    assert 0.3 < len(held) / len(wanted) < 0.7


def test_the_channel_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "channel"
    open_channel(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(AdaSpecError, match="open to other users"):
        open_channel(directory)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_channel_directory_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AdaSpecError, match="cannot be made"):
        open_channel(tmp_path / "channel")


def test_a_channel_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="too long a path"):
        open_channel(tmp_path / ("x" * 120))


def test_a_rollback_notice_belongs_to_no_request(endpoint: Endpoint, senders: list) -> None:
    receiver = FeedbackReceiver(endpoint, LINEAGE)
    sender = FeedbackSender(endpoint, share=0.0)
    senders.append(sender)
    notice = RollbackRecord(LINEAGE, 3, 2, "acceptance fell")
    assert sender.offer(notice)
    wordy = RollbackRecord(LINEAGE, 4, 3, "x" * 5000, "refusal")
    assert sender.offer(wordy)
    assert receive(receiver, 2) == [notice, replace(wordy, reason="x" * MAX_REASON)]
    receiver.close()
