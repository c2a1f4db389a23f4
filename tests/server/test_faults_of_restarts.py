"""A server that is killed and starts again finds the newest version, and its clients' requests.

Requests in flight when a server dies are lost with it, so clients ask again here, as they must.
"""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.fault_world import World, publishing, running_world
from tests.server.online_loop import metric, wait_for

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world(
    tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with running_world(tiny_target, tiny_drafter, tmp_path_factory.mktemp("restart")) as world:
        yield world


def test_a_killed_server_starts_again_with_a_newer_version(world: World) -> None:
    draw = random.Random(1)
    with world.fault("server killed, newer version on disk") as fault, world.traffic.repeated():
        for _ in range(3):
            with publishing(world) as publisher:
                publisher.publish_and_wait()
                fault.await_moment(draw, within=1.0)
                fault.strikes()
                world.kill_server()
                number = publisher.publish()
            world.start_server()
            fault.answers()
            wait_for(lambda number=number: world.served() == number)
            fault.version_served()
            assert metric(world.server, "adaspec_live_version") == number


def test_a_learner_goes_on_while_the_server_is_away(world: World) -> None:
    draw = random.Random(2)
    learner = world.start_learner()
    with world.fault("server killed beside a learner") as fault, world.traffic.repeated():
        for _ in range(3):
            served = world.served()
            before = world.statuses.wait(learner, lambda s, n=served: s.live_version > n)
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            world.kill_server()
            told = world.statuses.wait(learner)
            world.start_server()
            fault.answers()
            # It receives from the new server, learns from that, and the new server follows.
            done = told.feedback.get("completed", 0)
            world.statuses.wait(learner, lambda s, n=done: s.feedback["completed"] > n + 4)
            newest = max(world.live().number, world.served(), before.live_version)
            world.statuses.wait(learner, lambda s, n=newest: s.live_version > n)
            wait_for(lambda n=newest: world.served() > n)
            fault.version_served()
    assert "Traceback" not in learner.log()
    assert learner.end(signal.SIGTERM) == 0
