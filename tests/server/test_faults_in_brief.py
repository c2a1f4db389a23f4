"""A few faults of the thorough tests, each struck twice, in the time that there always is."""

import random
import signal
import time
from pathlib import Path

import msgspec
import pytest

from tests.server.fault_world import process_of, publishing, running_world, wait_for_refusal
from tests.server.online_loop import refusals, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


def test_faults_cost_no_request_and_change_no_output(
    tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(1)
    directory = tmp_path_factory.mktemp("brief")
    with running_world(tiny_target, tiny_drafter, directory) as world:
        with world.fault("learner killed") as fault:
            for _ in range(2):
                learner = world.start_learner()
                world.statuses.wait(learner)
                fault.await_moment(draw, within=1.0)
                fault.strikes()
                learner.end(signal.SIGKILL)
                fault.answers()
        with publishing(world) as publisher:
            pointer = publisher.writer.current()
            with world.fault("pointer torn") as fault:
                for _ in range(2):
                    before = len(refusals(world.server))
                    fault.await_moment(draw)
                    fault.strikes()
                    publisher.write_pointer(b'{"lineage":"'[: draw.randint(0, 12)])
                    wait_for_refusal(world, before, "is damaged")
                    fault.answers()
                publisher.write_pointer(msgspec.json.encode(pointer))
            scheduler = process_of(world, "sglang::scheduler")
            assert scheduler is not None
            with world.fault("scheduler paused") as fault:
                for _ in range(2):
                    fault.await_moment(draw)
                    fault.strikes()
                    scheduler.suspend()
                    number = publisher.publish()
                    time.sleep(draw.uniform(0.0, 1.0))
                    scheduler.resume()
                    fault.answers()
                    wait_for(lambda number=number: world.served() == number)
                    fault.version_served()
