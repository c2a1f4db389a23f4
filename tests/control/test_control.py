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
from adaspec.control.messages import Envelope, Reply
from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, open_channel


class Office:
    """A desk that is served on a thread."""

    def __init__(self, channel: Channel, act: Callable[[Request], str]) -> None:
        self.desk = ControlDesk(channel)
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
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    return open_channel(tmp_path_factory.mktemp("c") / "channel")


@pytest.fixture
def office(channel: Channel) -> Iterator[Office]:
    def act(request: Request) -> str:
        if isinstance(request, Pin):
            raise AdaSpecError("no such version; choose another.")
        return f"done: {request}"

    office = Office(channel, act)
    yield office
    office.close()


def test_a_request_is_carried_out_and_answered(channel: Channel, office: Office) -> None:
    assert ask(channel, Publish(directory="/d")) == f"done: {Publish(directory='/d')}"
    assert ask(channel, Inquire()) == f"done: {Inquire()}"


def test_a_refusal_is_the_operators_error(channel: Channel, office: Office) -> None:
    with pytest.raises(AdaSpecError, match="no such version; choose another"):
        ask(channel, Pin(version=7))


def test_nobody_there_is_said(channel: Channel) -> None:
    with pytest.raises(AdaSpecError, match="no learner was met"):
        ask(channel, Inquire(), timeout_s=0.1)


def send(channel: Channel, message: bytes) -> Reply:
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    try:
        socket.connect(channel.control.address)
        socket.send(message)
        assert socket.poll(5000)
        return msgspec.msgpack.decode(socket.recv(), type=Reply)
    finally:
        context.destroy(linger=0)


def enveloped(request: dict[str, object], token: object = "") -> bytes:
    return msgspec.msgpack.encode({"token": token, "request": request})


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xff",
        enveloped({"type": "pin", "version": -1}),
        enveloped({"type": "pin", "version": "1"}),
        enveloped({"type": "shutdown"}),
        enveloped({"type": "pause", "extra": 1}),
        enveloped({"type": "publish", "directory": ""}),
        enveloped({"type": "pause"}, token=7),
        enveloped({"type": "pause"}, token="x" * 200),
        msgspec.msgpack.encode({"type": "pause"}),
    ],
)
def test_what_is_no_request_is_counted_and_does_nothing(
    channel: Channel, office: Office, message: bytes
) -> None:
    reply = send(channel, message)
    assert not reply.done
    assert "did not understand" in reply.message
    assert office.desk.malformed == 1
    assert ask(channel, Inquire())


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_answered(message: bytes) -> None:
    desk = object.__new__(ControlDesk)
    desk.malformed = desk.refused = 0
    desk._token = "secret"
    carried_out: list[Request] = []

    def act(request: Request) -> str:
        carried_out.append(request)
        return ""

    reply = desk._answer(message, act)
    assert reply.done == bool(carried_out)
    assert desk.malformed == (not carried_out)


@pytest.mark.parametrize("token", ["", "guessed", "Ω"])
def test_a_request_without_the_token_does_nothing(
    channel: Channel, office: Office, token: str
) -> None:
    reply = send(channel, msgspec.msgpack.encode(Envelope(token=token, request=Inquire())))
    assert not reply.done
    assert "does not know the request's token" in reply.message
    assert office.desk.refused == 1
    assert ask(channel, Inquire())


def test_every_learner_makes_a_new_token_that_only_its_user_can_read(channel: Channel) -> None:
    assert channel.control_token() == ""
    first = channel.make_control_token()
    assert channel.control_token() == first
    assert len(first) > 32
    assert channel.token is not None
    assert channel.token.stat().st_mode & 0o777 == 0o600
    assert channel.make_control_token() == channel.control_token() != first
