"""The relay process must make the very records that a collector in the server would make."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from adaspec.feedback import (
    BlockRecord,
    ContextRecord,
    EndCapture,
    EndRecord,
    FeedbackCollector,
    FeedbackReceiver,
    FeedbackRelay,
    HiddenTeacher,
    PrefillCapture,
    Record,
    RelayOptions,
    RollbackRecord,
    StepCapture,
    TopKTeacher,
    open_channel,
)
from adaspec.feedback.captures import Capture
from adaspec.feedback.relay_wire import Lost, Rollback, decode, encode, tensors_of
from adaspec.feedback.wire import encode as encode_record
from tests.feedback.records import LINEAGE

WIDTH, TAPS, HIDDEN = 4, 6, 3


def prefill(*requests: str) -> PrefillCapture:
    count = len(requests)
    return PrefillCapture(
        requests, 0, [[i, i + 1] for i in range(count)], [0] * count, torch.randn(2 * count, TAPS)
    )


def step(*requests: str, kind: str = "hidden", ragged: bool = False) -> StepCapture:
    n = len(requests)
    states = torch.randn(n * WIDTH, HIDDEN, dtype=torch.bfloat16)
    top_k = TopKTeacher(
        torch.randn(n * WIDTH, 2), torch.randint(0, 9, (n * WIDTH, 2)).int(), torch.randn(n * WIDTH)
    )
    return StepCapture(
        requests=requests,
        version=3,
        temperatures=[0.5] * n,
        anchors=torch.full((n,), 2),
        tokens=torch.randint(0, 90, (n, WIDTH)),
        accepted=torch.ones(n, dtype=torch.int32),
        bonus=torch.randint(0, 90, (n,)),
        taps=torch.randn(n, WIDTH, TAPS, dtype=torch.bfloat16),
        teacher=HiddenTeacher(states) if kind == "hidden" else top_k,
        verify_lengths=torch.full((n,), 3, dtype=torch.int32) if ragged else None,
    )


class Sender:
    """Keeps what a collector makes."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def offer(self, record: Record) -> bool:
        self.records.append(record)
        return True


def direct(captures: list[Capture]) -> list[Record]:
    sender = Sender()
    collector = FeedbackCollector(sender, LINEAGE)
    for capture in captures:
        collector.submit(capture)
    return sender.records


def bytes_of(record: Record) -> list[bytes]:
    return [bytes(frame) for frame in encode_record(record)]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


class Line:
    """A relay with a learner behind it."""

    def __init__(self, directory: Path) -> None:
        endpoint = open_channel(directory).feedback
        self.receiver = FeedbackReceiver(endpoint, LINEAGE)
        self.relay = FeedbackRelay(RelayOptions(feedback=endpoint, lineage=LINEAGE))

    def submit(self, *captures: Capture) -> None:
        for capture in captures:
            self.relay.submit(capture)

    def records(self, ends: int) -> list[Record]:
        """Everything up to a number of end records."""
        found: list[Record] = []
        deadline = time.monotonic() + 90
        while sum(isinstance(record, EndRecord) for record in found) < ends:
            assert time.monotonic() < deadline, found
            record = self.receiver.receive(0.2)
            if record is not None:
                found.append(record)
        return found

    def close(self) -> None:
        self.relay.close()
        self.receiver.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path / "channel")
    yield line
    line.close()


@pytest.mark.parametrize(
    "message",
    [
        prefill("a", "b"),
        step("a"),
        step("a", "b", kind="top-k", ragged=True),
        step("a", "b", ragged=True),
        EndCapture("a", 5, "aborted"),
        Rollback(2, 1, "worse", "refusal"),
        Lost(["a"]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_the_wire(message: Capture | Rollback | Lost) -> None:
    back = decode([bytearray(frame) for frame in encode(message)])
    assert type(back) is type(message)
    if isinstance(message, PrefillCapture | StepCapture):
        assert list(back.requests) == list(message.requests)
        assert back.version == message.version
    for ours, theirs in zip(tensors_of(back), tensors_of(message), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    if isinstance(message, Rollback | Lost | EndCapture):
        assert back == message


def test_tensors_in_one_piece_of_memory_are_one_frame() -> None:
    apart = step("a", "b", kind="top-k", ragged=True)
    tensors = sorted(tensors_of(apart), key=lambda tensor: -tensor.element_size())
    memory = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    start, moved = 0, {}
    for tensor in tensors:
        end = start + tensor.nbytes
        moved[id(tensor)] = memory[start:end].view(tensor.dtype).view(tensor.shape)
        start = end
    fields = ("anchors", "tokens", "accepted", "bonus", "taps", "verify_lengths")
    teacher = type(apart.teacher)(*(moved[id(t)] for t in apart.teacher.tensors()))
    together = replace(
        apart, teacher=teacher, **{name: moved[id(getattr(apart, name))] for name in fields}
    )
    frames = encode(together)
    assert [len(frame) for frame in frames[1:]] == [len(memory)]
    back = decode([bytearray(frame) for frame in frames])
    for ours, theirs in zip(tensors_of(back), tensors_of(apart), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="beyond"):
        decode([bytearray(frames[0]), bytearray(frames[1])[:-1]])


@pytest.mark.parametrize("spoil", [lambda f: f[:-1], lambda f: [b"x", *f[1:]], lambda f: [f[0]]])
def test_a_message_that_is_none_is_refused(spoil: Callable[[list[bytes]], list[bytes]]) -> None:
    frames = [bytes(frame) for frame in encode(step("a"))]
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        decode([bytearray(frame) for frame in spoil(frames)])


def test_the_relay_makes_the_records_of_a_collector(line: Line) -> None:
    torch.manual_seed(0)
    captures = [
        prefill("a", "b"),
        step("a", "b", ragged=True),
        EndCapture("a", 4),
        EndCapture("b", 4, "aborted"),
    ]
    line.submit(*captures)
    line.relay.report_rollback(5, 4, "it commits less")
    found = line.records(ends=2)
    assert list(map(bytes_of, found)) == list(map(bytes_of, direct(captures)))
    notice = line.receiver.receive(30)
    assert notice == RollbackRecord(LINEAGE, 5, 4, "it commits less", "acceptance")
    wait_for(lambda: line.relay.stats().sent == 7)
    assert line.relay.stats().dropped == {}


def test_a_copy_is_waited_for_and_a_failed_one_is_counted(line: Line) -> None:
    taps, copied = torch.zeros(2, TAPS), threading.Event()

    def finish_copy() -> None:
        assert copied.wait(60)
        taps.fill_(7.0)

    def fail() -> None:
        raise RuntimeError("the copy failed")

    line.submit(
        PrefillCapture(["odd"], 0, [[1]], [0], torch.zeros(1, TAPS, dtype=torch.complex64)),
        PrefillCapture(["lost"], 0, [[1]], [0], torch.zeros(1, TAPS), wait=fail),
        PrefillCapture(["a"], 0, [[1, 2]], [0], taps, wait=finish_copy),
        EndCapture("a", 2),
    )
    copied.set()
    first = line.records(ends=1)[0]
    assert isinstance(first, ContextRecord)
    assert bool((first.taps == 7.0).all())
    assert line.relay.stats().dropped == {"relay-error": 2}
    assert not line.relay.wants("odd")
    assert not line.relay.wants("lost")
    assert line.relay.wants("a")


def test_a_relay_that_was_killed_is_started_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaspec.feedback.relay._RESTART_S", 0.0)
    line.submit(prefill("a"), EndCapture("a", 2))
    line.records(ends=1)
    pid = line.relay.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: line.relay.pid != pid)
    line.submit(prefill("b"), step("b"), EndCapture("b", 4))
    found = [r for r in line.records(ends=1) if getattr(r, "request", "") == "b"]
    assert [type(record) for record in found] == [ContextRecord, BlockRecord, EndRecord]


def test_a_relay_that_hangs_costs_records_and_nothing_else(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.submit(prefill("first"), EndCapture("first", 2))
    line.records(ends=1)
    capture = step("a")
    capture.teacher.states.data = torch.zeros(WIDTH, 200_000, dtype=torch.bfloat16)  # 1.6 MB
    monkeypatch.setattr("adaspec.feedback.relay._PENDING_BYTES", 3_500_000)
    pid = line.relay.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        line.submit(prefill("a"))
        started = time.monotonic()
        for _ in range(200):
            line.submit(capture)
        assert time.monotonic() - started < 5.0
        wait_for(lambda: line.relay.stats().dropped.get("relay-full", 0) > 100)
        assert not line.relay.wants("a")
    finally:
        os.kill(pid, signal.SIGCONT)
    line.submit(EndCapture("a", 4), prefill("b"), step("b"), EndCapture("b", 4))
    found = [r for r in line.records(ends=1) if getattr(r, "request", "") == "b"]
    assert [type(record) for record in found] == [ContextRecord, BlockRecord, EndRecord]


def test_the_relay_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from adaspec.feedback import FeedbackRelay, RelayOptions, open_channel\n"
        "directory = Path(sys.argv[1])\nendpoint = open_channel(directory).feedback\n"
        f"relay = FeedbackRelay(RelayOptions(feedback=endpoint, lineage={LINEAGE!r}))\n"
        "while relay.pid is None: time.sleep(0.01)\nprint(relay.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "channel")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    relay = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: "relay_process" in " ".join(relay.cmdline()))
    time.sleep(3.0)  # let it import
    parent.kill()
    parent.wait()
    relay.wait(30)
