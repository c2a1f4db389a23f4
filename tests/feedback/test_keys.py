"""With keys the channel leaves the machine: encrypted, and closed to whoever has none."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from adaspec.control import ControlDesk, Inquire, ask
from adaspec.control.messages import Envelope
from adaspec.errors import AdaSpecError
from adaspec.feedback import (
    Channel,
    Endpoint,
    EndRecord,
    FeedbackReceiver,
    FeedbackSender,
    find_channel,
    network_channel,
    open_channel,
)
from adaspec.feedback.keys import LearnerKeys, OperatorKeys, ServerKeys, make_keys, read_keys
from adaspec.feedback.sockets import bind, check_endpoint, connect
from adaspec.load.launch import free_port

LINEAGE = "f" * 16
RECORD = EndRecord(LINEAGE, "r", 3, 40, "finished")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return dict(make_keys(tmp_path / "keys"))


def a_network_address() -> str:
    return f"tcp://127.0.0.1:{min(free_port(), 65000)}"


@pytest.fixture
def address() -> str:
    return a_network_address()


def test_each_role_holds_what_it_needs_and_no_more(keys: dict[str, Path]) -> None:
    learner = read_keys(keys["learner"], LearnerKeys)
    server = read_keys(keys["server"], ServerKeys)
    operator = read_keys(keys["operator"], OperatorKeys)
    assert server.learner == operator.learner == learner.public
    assert set(learner.peers) == {server.public, operator.public}
    assert operator.control_token == learner.control_token
    text = keys["server"].read_text() + keys["operator"].read_text()
    assert learner.secret not in text
    assert learner.signing not in text
    assert learner.control_token not in keys["server"].read_text()
    for path in keys.values():
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AdaSpecError, match="the keys of a server; the learner's are needed"):
        read_keys(keys["server"], LearnerKeys)


def test_keys_are_never_written_over(keys: dict[str, Path]) -> None:
    before = keys["learner"].read_bytes()
    with pytest.raises(AdaSpecError, match="exists"):
        make_keys(keys["learner"].parent)
    assert keys["learner"].read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.chmod(0o640), "open to other users"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_text("{}"), "holds no keys"),
        (lambda path: path.write_text(path.read_text()[:-3]), "holds no keys"),
        (lambda path: path.write_bytes(b"\xff" * 200_000), "holds no keys"),
    ],
)
def test_bad_keys_are_named(
    keys: dict[str, Path], damage: Callable[[Path], object], reason: str
) -> None:
    damage(keys["server"])
    with pytest.raises(AdaSpecError, match=reason):
        read_keys(keys["server"], ServerKeys)


def test_records_and_requests_travel_between_machines(keys: dict[str, Path], address: str) -> None:
    at_home = network_channel(address, keys["learner"])
    receiver = FeedbackReceiver(at_home.feedback, LINEAGE)
    sender = FeedbackSender(network_channel(address, keys["server"]).feedback)
    sender.offer(RECORD)
    assert receiver.receive(10.0) == RECORD
    sender.close()
    receiver.close()
    desk = ControlDesk(at_home)
    answered = served_until(
        desk, lambda: ask(network_channel(address, keys["operator"]), Inquire(), 10.0)
    )
    assert answered == "done"


def test_an_operator_with_other_keys_is_told_so(
    keys: dict[str, Path], address: str, tmp_path: Path
) -> None:
    desk = ControlDesk(network_channel(address, keys["learner"]))
    other = network_channel(address, make_keys(tmp_path / "other")["operator"])
    begun = time.monotonic()
    with pytest.raises(AdaSpecError, match=r"no learner that knows .*operator\.keys was met"):
        served_until(desk, lambda: ask(other, Inquire(), 2.0))
    assert time.monotonic() - begun < 20.0


def served_until(desk: ControlDesk, act: Callable[[], str]) -> str:
    """The result of ``act``, while a desk is served; the desk is closed."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(act)
        while not result.done():
            desk.serve(lambda request: "done")
            time.sleep(0.01)
    desk.close()
    return result.result()


def test_strangers_do_not_get_in(
    keys: dict[str, Path], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = FeedbackReceiver(network_channel(address, keys["learner"]).feedback, LINEAGE)
    other = make_keys(tmp_path / "other")
    # A stranger who knows the learner's public key, which is no secret, but is not known to it.
    forged = msgspec.structs.replace(
        read_keys(other["server"], ServerKeys),
        learner=read_keys(keys["server"], ServerKeys).learner,
    )
    forged_file = tmp_path / "forged.keys"
    forged_file.touch(0o600)
    forged_file.write_bytes(msgspec.json.encode(forged))
    strangers = [
        FeedbackSender(Endpoint(address)),  # no encryption at all
        FeedbackSender(network_channel(address, other["server"]).feedback),
        FeedbackSender(network_channel(address, forged_file).feedback),
    ]
    for stranger in strangers:
        stranger.offer(RECORD)
    assert receiver.receive(2.0) is None
    assert receiver.stats().received == 0
    assert "a stranger was turned away" in caplog.text
    known = FeedbackSender(network_channel(address, keys["server"]).feedback)
    known.offer(RECORD)
    assert receiver.receive(10.0) == RECORD
    for sender in (*strangers, known):
        sender.close()
    receiver.close()


def test_a_false_learner_gets_no_feedback(
    keys: dict[str, Path], address: str, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    false = FeedbackReceiver(network_channel(address, other["learner"]).feedback, LINEAGE)
    sender = FeedbackSender(network_channel(address, keys["server"]).feedback)
    sender.offer(RECORD)
    assert false.receive(1.5) is None
    assert false.stats().received == 0
    assert sender.stats().sent == 0
    sender.close()
    false.close()


def test_nobody_reads_what_travels(keys: dict[str, Path], address: str) -> None:
    """All bytes between the two are recorded by a relay in their middle."""
    import socket
    import threading

    middle = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.append(data)
            sink.sendall(data)

    def relay() -> None:
        client, _ = middle.accept()
        server = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        for ends in ((client, server), (server, client)):
            threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=relay, daemon=True).start()
    receiver = FeedbackReceiver(network_channel(address, keys["learner"]).feedback, LINEAGE)
    marker = "a-request-nobody-may-see"
    port = middle.getsockname()[1]
    sender = FeedbackSender(Endpoint(f"tcp://127.0.0.1:{port}", str(keys["server"])))
    sender.offer(EndRecord(LINEAGE, marker, 3, 40, "finished"))
    record = receiver.receive(10.0)
    assert isinstance(record, EndRecord)
    assert record.request == marker
    assert seen
    assert marker.encode() not in b"".join(seen)
    sender.close()
    receiver.close()


def test_servers_cannot_steer_the_learner(keys: dict[str, Path], address: str) -> None:
    """A server's keys open the socket, but it does not know the token."""
    desk = ControlDesk(network_channel(address, keys["learner"]))
    with pytest.raises(AdaSpecError, match="the keys of a server; the operator's are needed"):
        ask(network_channel(address, keys["server"]), Inquire())

    def guess() -> str:
        line = connect(zmq.REQ, network_channel(address, keys["server"]).control)
        line.socket.send(msgspec.msgpack.encode(Envelope(token="", request=Inquire())))
        answer = line.socket.recv() if line.socket.poll(10_000) else b""
        line.close()
        return answer.decode(errors="replace")

    assert "does not know the request's token" in served_until(desk, guess)
    assert desk.refused == 1


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5", "tcp://*:5", "udp://127.0.0.1:5", "x"])
def test_open_sockets_do_not_leave_the_machine(address: str) -> None:
    with pytest.raises(AdaSpecError):
        check_endpoint(Endpoint(address))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5", "tcp://[::1]:5", "ipc:///run/x.sock"])
def test_local_endpoints_are_accepted(address: str) -> None:
    assert check_endpoint(Endpoint(address)) == Endpoint(address)


def test_channels_are_found_by_their_settings(keys: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "channel"
    assert find_channel(str(directory), None, None) == open_channel(directory)
    with_keys = find_channel(str(directory), None, str(keys["server"]))
    assert with_keys.feedback.keys == str(keys["server"])
    assert with_keys.token is None
    far: Channel = find_channel(None, "tcp://learner.example:7000", str(keys["server"]))
    assert far.control.address == "tcp://learner.example:7003"
    for wrong in (
        (None, None, None),
        (str(directory), "tcp://h:1", None),
        (None, "tcp://h:1", None),
        (None, "h:1", str(keys["server"])),
        (None, "tcp://h:65535", str(keys["server"])),
    ):
        with pytest.raises(AdaSpecError):
            find_channel(*wrong)


def test_an_address_that_is_taken_is_named(address: str) -> None:
    first = bind(zmq.PULL, Endpoint(address))
    with pytest.raises(AdaSpecError, match="cannot be used"):
        bind(zmq.PULL, Endpoint(address))
    first.close()
