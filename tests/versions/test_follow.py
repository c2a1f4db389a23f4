import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, open_channel
from adaspec.versions import (
    Announcer,
    Arrival,
    Pointer,
    Refusal,
    StagedVersion,
    VersionFollower,
    VersionWatcher,
    VersionWriter,
    open_writer,
)
from tests.versions.test_store import PROVENANCE, changed
from tests.versions.tiny import tiny_drafter_directory

NEVER = 3600.0


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    return open_channel(tmp_path / "channel")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[VersionWriter]:
    writer = open_writer(tmp_path / "store", tiny_drafter_directory(tmp_path / "base"))
    yield writer
    writer.close()


def eventually(get: Callable[[], object], seconds: float = 20.0) -> object:
    deadline = time.monotonic() + seconds
    while (value := get()) is None:
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.01)
    return value


def publish(writer: VersionWriter, by: float) -> Pointer:
    return writer.point(writer.add(changed(writer, by), PROVENANCE).number, "better")


def test_a_late_watcher_gets_the_current_version_at_once(
    channel: Channel, writer: VersionWriter
) -> None:
    pointer = publish(writer, 1.0)
    watcher = VersionWatcher(writer.directory, channel.versions, writer.lineage, NEVER)
    assert watcher.poll() == pointer
    assert watcher.poll() is None
    watcher.close()


def test_announcements_are_followed_and_missed_ones_are_made_good(
    channel: Channel, writer: VersionWriter
) -> None:
    watcher = VersionWatcher(writer.directory, channel.versions, writer.lineage, 0.2)
    assert watcher.poll() == writer.current()
    unannounced = publish(writer, 1.0)
    assert eventually(lambda: watcher.poll(0.05)) == unannounced
    watcher.close()

    watcher = VersionWatcher(writer.directory, channel.versions, writer.lineage, NEVER)
    watcher.poll()
    announcer = Announcer(channel.versions)
    pointer = publish(writer, 2.0)

    def announce_and_poll() -> Pointer | None:  # a subscription takes a moment to arrive
        announcer.announce(pointer)
        return watcher.poll(0.05)

    assert eventually(announce_and_poll) == pointer
    announcer.close()
    watcher.close()


def test_garbage_on_the_channel_does_nothing(channel: Channel, writer: VersionWriter) -> None:
    watcher = VersionWatcher(writer.directory, channel.versions, writer.lineage, NEVER)
    watcher.poll()
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(channel.versions.address)
    for _ in range(20):
        socket.send_multipart([b"garbage", b"more"])
        assert watcher.poll(0.02) is None
    context.destroy(linger=0)
    watcher.close()


def test_a_watcher_waits_for_the_store(tmp_path: Path, channel: Channel) -> None:
    watcher = VersionWatcher(tmp_path / "store", channel.versions, "0" * 16, 0.0)
    assert watcher.poll() is None
    watcher.close()


def test_another_version_of_the_same_turn_is_noticed(
    channel: Channel, writer: VersionWriter
) -> None:
    """As in a store that was deleted and made anew."""
    watcher = VersionWatcher(writer.directory, channel.versions, writer.lineage, 0.0)
    pointer = publish(writer, 1.0)
    assert watcher.poll() == pointer
    other = msgspec.structs.replace(pointer, number=0)
    (writer.directory / "CURRENT").write_bytes(msgspec.json.encode(other))
    assert watcher.poll() == other
    assert watcher.poll() is None
    watcher.close()


def test_another_lineage_is_refused(channel: Channel, writer: VersionWriter) -> None:
    watcher = VersionWatcher(writer.directory, channel.versions, "0" * 16, 0.0)
    with pytest.raises(AdaSpecError, match="same drafter"):
        watcher.poll()
    watcher.close()


def test_the_follower_hands_over_checked_versions(channel: Channel, writer: VersionWriter) -> None:
    announcer = Announcer(channel.versions)
    prepared: list[int] = []

    def prepare(version: StagedVersion) -> StagedVersion:
        prepared.append(version.manifest.number)
        return version

    follower = VersionFollower(writer.directory, channel.versions, writer.lineage, prepare)
    first = eventually(follower.take)
    assert isinstance(first, Arrival)
    assert first.pointer.number == 0
    assert follower.take() is None

    pointer = publish(writer, 1.0)
    announcer.announce(pointer)
    arrival = eventually(follower.take)
    assert isinstance(arrival, Arrival)
    assert arrival.pointer == pointer
    expected = changed(writer, 1.0)
    assert all(torch.equal(arrival.version.tensors[name], expected[name]) for name in expected)
    assert prepared == [0, 1]
    follower.close()
    announcer.close()


def test_a_bad_version_is_skipped_and_the_next_one_followed(
    channel: Channel, writer: VersionWriter
) -> None:
    announcer = Announcer(channel.versions)
    follower = VersionFollower(writer.directory, channel.versions, writer.lineage)
    eventually(follower.take)
    bad = publish(writer, 1.0)
    path = writer.path(bad.number) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    announcer.announce(bad)
    refusal = eventually(follower.take_refusal)
    assert isinstance(refusal, Refusal)
    assert refusal.number == bad.number
    assert "the file is damaged" in refusal.reason
    assert follower.take_refusal() is None
    eventually(lambda: follower.failures or None)
    assert follower.take() is None
    good = publish(writer, 2.0)
    announcer.announce(good)
    arrival = eventually(follower.take)
    assert isinstance(arrival, Arrival)
    assert arrival.pointer == good
    follower.close()
    announcer.close()
