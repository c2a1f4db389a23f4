"""Requests travel, are answered in a sentence, and nothing else gets in."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from adaspec.control import ControlDesk, Inquire, Pin, Publish, Request, ask
from adaspec.control.messages import Reply
from adaspec.errors import AdaSpecError
from adaspec.feedback import open_channel


class Office:
    """A desk that is served on a thread."""

    def __init__(self, endpoint: str, act: Callable[[Request], str]) -> None:
        self.desk = ControlDesk(endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(act,))
        self._thread.start()

    def _run(self, act: Callable[[Request], str]) -> None:
        while not self._stop.is_set():
            self.desk.serve(act)
            time.sleep(0.005)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.desk.close()


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return open_channel(tmp_path_factory.mktemp("c") / "channel").control


@pytest.fixture
def office(endpoint: str) -> Iterator[Office]:
    def act(request: Request) -> str:
        if isinstance(request, Pin):
            raise AdaSpecError("no such version; choose another.")
        return f"done: {request}"

    office = Office(endpoint, act)
    yield office
    office.close()


def test_a_request_is_carried_out_and_answered(endpoint: str, office: Office) -> None:
    assert ask(endpoint, Publish(directory="/d")) == f"done: {Publish(directory='/d')}"
    assert ask(endpoint, Inquire()) == f"done: {Inquire()}"


def test_a_refusal_is_the_operators_error(endpoint: str, office: Office) -> None:
    with pytest.raises(AdaSpecError, match="no such version; choose another"):
        ask(endpoint, Pin(version=7))


def test_nobody_there_is_said(endpoint: str) -> None:
    with pytest.raises(AdaSpecError, match="no learner answered"):
        ask(endpoint, Inquire(), timeout_s=0.1)


def send(endpoint: str, message: bytes) -> Reply:
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    try:
        socket.connect(endpoint)
        socket.send(message)
        assert socket.poll(5000)
        return msgspec.msgpack.decode(socket.recv(), type=Reply)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode({"type": "pin", "version": -1}),
        msgspec.msgpack.encode({"type": "pin", "version": "1"}),
        msgspec.msgpack.encode({"type": "shutdown"}),
        msgspec.msgpack.encode({"type": "pause", "extra": 1}),
        msgspec.msgpack.encode({"type": "publish", "directory": ""}),
    ],
)
def test_what_is_no_request_is_counted_and_does_nothing(
    endpoint: str, office: Office, message: bytes
) -> None:
    reply = send(endpoint, message)
    assert not reply.done
    assert "did not understand" in reply.message
    assert office.desk.malformed == 1
    assert ask(endpoint, Inquire())


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_answered(message: bytes) -> None:
    desk = object.__new__(ControlDesk)
    desk.malformed = 0
    carried_out: list[Request] = []

    def act(request: Request) -> str:
        carried_out.append(request)
        return ""

    reply = desk._answer(message, act)
    assert reply.done == bool(carried_out)
    assert desk.malformed == (not carried_out)
