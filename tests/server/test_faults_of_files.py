"""Whatever happens to the files that server and learner share, serving goes on unchanged.

One server for all tests, requests in flight all the time, every answer compared.
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from adaspec.versions import VersionStore
from tests.server.fault_world import (
    World,
    published_and_served,
    publishing,
    wait_for_refusal,
)
from tests.server.harms import obey_permissions
from tests.server.online_loop import add_version, metric, refusals, swaps, wait_for
from tests.server.troubled import trouble

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(600)]

WEIGHTS, MANIFEST, CONFIG = "model.safetensors", "manifest.json", "config.json"


def test_no_fault_for_comparison(world: World) -> None:
    draw = random.Random(0)
    with world.fault("none, for comparison") as fault:
        for _ in range(10):
            fault.await_moment(draw)
            fault.strikes()
            fault.answers()


def test_a_version_torn_at_any_byte_is_refused(world: World) -> None:
    draw = random.Random(1)
    with publishing(world) as publisher, world.fault("version torn") as fault:
        live = publisher.publish_and_wait()
        number = add_version(publisher.writer, world.drafter, seed=100)
        version, base = publisher.writer.path(number), publisher.writer.path(0)
        weights, manifest = (version / WEIGHTS).read_bytes(), (version / MANIFEST).read_bytes()
        header = 8 + int.from_bytes(weights[:8], "little")
        starts = [0, 1, 7, 8, draw.randrange(9, header - 1), header - 1, header, header + 1]
        inside = [draw.randrange(header, len(weights)) for _ in range(3)]
        cuts = [(version / WEIGHTS, at) for at in [*starts, *inside, len(weights) - 1]]
        for path in (version / MANIFEST, base / MANIFEST, base / CONFIG):
            size = path.stat().st_size
            inside = [draw.randrange(2, size - 2) for _ in range(3)]
            cuts += [(path, at) for at in [0, 1, *inside, size - 2]]
        for turn, (path, at) in enumerate(cuts):
            whole, before = path.read_bytes(), len(refusals(world.server))
            path.write_bytes(whole[:at])
            fault.await_moment(draw, within=0.1)
            fault.strikes()
            publisher.point(number)
            wait_for_refusal(world, before, "")
            assert world.served() == live, (path, at)
            fault.answers()
            path.write_bytes(whole)
            if turn % 5 == 4:
                live = publisher.publish_and_wait()
                fault.version_served()
        assert (version / WEIGHTS).read_bytes() == weights
        assert (version / MANIFEST).read_bytes() == manifest
        publisher.point(number)  # whole again, it is as good as any other
        wait_for(lambda: world.served() == number)


def test_a_pointer_torn_at_any_byte_is_refused(world: World) -> None:
    with publishing(world) as publisher, world.fault("pointer torn") as fault:
        live = publisher.publish_and_wait()
        number = add_version(publisher.writer, world.drafter, seed=101)
        pointer = publisher.point(live)
        whole = msgspec.json.encode(
            msgspec.structs.replace(pointer, sequence=pointer.sequence + 1, number=number)
        )
        for length in range(len(whole)):
            before = len(refusals(world.server))
            fault.strikes()
            publisher.write_pointer(whole[:length])
            wait_for_refusal(world, before, "is damaged")
        fault.answers()
        assert world.served() == live
        publisher.write_pointer(whole)
        wait_for(lambda: world.served() == number)
        fault.version_served()


def test_the_pointer_is_the_truth_whatever_is_announced(world: World) -> None:
    draw = random.Random(2)
    with publishing(world) as publisher, world.fault("stale and repeated announcements") as fault:
        olds = [publisher.publish_and_wait() for _ in range(2)]
        old = publisher.writer.current()
        live = publisher.publish_and_wait()
        now = publisher.writer.current()
        known = len(swaps(world.server))
        lies = [
            now,
            old,
            msgspec.structs.replace(old, sequence=now.sequence + 5),
            msgspec.structs.replace(now, number=olds[0]),
            msgspec.structs.replace(now, number=99_999_999, sequence=now.sequence + 9),
        ]
        for _ in range(10):
            fault.await_moment(draw, within=0.1)
            fault.strikes()
            for lie in draw.choices(lies, k=8):
                publisher.announcer.announce(lie)
            fault.answers()
        assert world.served() == live
        assert len(swaps(world.server)) == known


def test_pointers_that_go_backwards_or_nowhere(world: World) -> None:
    draw = random.Random(3)
    with publishing(world) as publisher, world.fault("stale and wrong pointers") as fault:
        good = [publisher.publish_and_wait() for _ in range(3)]
        for _ in range(4):
            sequence = publisher.writer.current().sequence
            # A number that no version has, in a pointer that is newer than any.
            before, live = len(refusals(world.server)), world.served()
            fault.await_moment(draw)
            fault.strikes()
            publisher.point(draw.randrange(10**6, 10**8))
            wait_for_refusal(world, before, "is not in")
            assert world.served() == live
            fault.answers()
            # A pointer out of a backup; the same sequence again, with another version.
            for turn in (draw.randrange(sequence), sequence):
                for _ in range(2):
                    number = draw.choice([n for n in good if n != world.served()])
                    fault.await_moment(draw)
                    fault.strikes()
                    publisher.point(number, sequence=turn)
                    wait_for(lambda number=number: world.served() == number)
                    fault.version_served()
                    fault.answers()
            good.append(publisher.publish_and_wait())


def remove(path: Path) -> None:
    shutil.rmtree(path)


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no directory")


@pytest.mark.parametrize("spoil", [remove, become_a_file])
def test_the_store_may_vanish_under_server_and_learner(
    world: World, spoil: Callable[[Path], None]
) -> None:
    draw = random.Random(4)
    name = "store deleted" if spoil is remove else "store replaced by a file"
    with world.fault(name) as fault:
        for _ in range(3):
            learner = world.start_learner()
            first = world.statuses.wait(learner, lambda s: s.published > 0 and s.live_version > 0)
            wait_for(lambda: world.served() > 0)
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            spoil_while_written(world.store, spoil)
            fault.answers()
            # It tells of what it cannot do, and goes on.
            failed = world.statuses.wait(learner, lambda s, n=first.failures: s.failures > n)
            world.statuses.wait(learner, lambda s, n=failed.steps: s.steps > n + 10)
            fault.answers()
            assert "Traceback" not in learner.log()
            assert learner.end(signal.SIGTERM) == 0
            if world.store.is_file():
                world.store.unlink()
            swapped = len(swaps(world.server))
            fresh = world.start_learner()
            world.statuses.wait(fresh, lambda s: s.live_version > 0)
            # The new store's versions have numbers and sequences that the old one's had too.
            wait_for(lambda n=swapped: len(swaps(world.server)) > n and world.served() > 0)
            wait_for(lambda: world.served() == world.live().number, 60)
            fault.version_served()
            fault.answers()
            fresh.end(signal.SIGKILL)


def spoil_while_written(path: Path, spoil: Callable[[Path], None]) -> None:
    """Removal of a tree fails where a writer adds a file meanwhile; go on until it is gone."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return spoil(path)
        except OSError:
            assert time.monotonic() < deadline


def test_a_read_only_store_stops_publication_and_nothing_else(world: World) -> None:
    draw = random.Random(5)
    learner = world.start_learner(obey_permissions)
    with world.fault("store read-only for the learner") as fault:
        for _ in range(4):
            before = world.statuses.wait(learner, lambda s: s.steps > 0)
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            directories = [world.store, world.store / "versions", world.store / "learner"]
            for directory in directories:
                directory.chmod(0o555)
            live = world.live()
            fault.answers()
            refused = world.statuses.wait(learner, lambda s, n=before.failures: s.failures > n + 1)
            world.statuses.wait(learner, lambda s, n=refused.steps: s.steps > n + 10)
            assert world.live().number == live.number
            for directory in directories:
                directory.chmod(0o755)
            published_and_served(world, learner, live.number)
            fault.version_served()
    assert "Permission denied" in learner.log()
    assert "Traceback" not in learner.log()
    assert learner.end(signal.SIGTERM) == 0


def test_a_slow_disk_delays_versions_and_nothing_else(world: World) -> None:
    draw = random.Random(6)
    with publishing(world) as publisher, world.fault("slow disk for the server") as fault:
        for _ in range(4):
            live = publisher.publish_and_wait()
            number = add_version(publisher.writer, world.drafter, seed=draw.randrange(1000))
            pause = world.troubles.disk_s = draw.uniform(2.0, 4.0)
            fault.await_moment(draw)
            fault.strikes()
            begun = time.monotonic()
            publisher.point(number)
            fault.answers()
            if time.monotonic() - begun < pause:
                assert world.served() == live
            wait_for(lambda number=number: world.served() == number)
            assert time.monotonic() - begun > pause
            fault.version_served()
            world.troubles.disk_s = 0.0
    learner = world.start_learner(partial(trouble, world.troubles_file))
    world.statuses.wait(learner, lambda status: status.steps > 0)
    with world.fault("slow disk for server and learner") as fault:
        for _ in range(4):
            before = max(world.live().number, world.served())
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            world.troubles.disk_s = draw.uniform(0.2, 0.6)
            fault.answers()
            published_and_served(world, learner, before)
            fault.version_served()
            world.troubles.disk_s = 0.0
    assert learner.end(signal.SIGTERM) == 0
    assert metric(world.server, "adaspec_audit_failures_total") == 0


def test_the_store_is_whole_in_the_end(world: World) -> None:
    """What the tests before have left is a store like any other."""
    learner = world.start_learner()
    published_and_served(world, learner, world.live().number)
    assert learner.end(signal.SIGTERM) == 0
    store = VersionStore(world.store)
    for number in store.numbers():
        assert store.stage(number).manifest.number == number
    for line in (world.store / "decisions.jsonl").read_text().splitlines():
        json.loads(line)
