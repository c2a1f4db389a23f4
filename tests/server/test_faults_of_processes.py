"""Whatever happens to the processes around the scheduler, and to itself, serving goes on unchanged.

One server for all tests, requests in flight all the time, every answer compared.
"""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from adaspec.feedback import FeedbackReceiver
from online.publisher import Publisher
from online.trainer import Trainer
from tests.server.fault_world import (
    World,
    process_of,
    published_and_served,
    publishing,
)
from tests.server.forked_learner import ForkedLearner
from tests.server.harms import run_out_of_memory
from tests.server.online_loop import wait_for
from tests.server.troubled import trouble

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(600)]

RELAY = "relay_process"


def test_a_learner_that_stops_and_goes_on(world: World) -> None:
    draw = random.Random(1)
    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.published > 0)
    with world.fault("learner stopped for a while") as fault:
        for _ in range(10):
            before = max(world.live().number, world.served())
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            learner.stop()
            fault.answers()
            time.sleep(draw.uniform(0.0, 2.0))
            learner.resume()
            published_and_served(world, learner, before)
            fault.version_served()
    assert learner.end(signal.SIGTERM) == 0


def test_a_slow_learner(world: World) -> None:
    draw = random.Random(2)
    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.published > 0)
    with world.fault("learner slowed ten times") as fault:
        for _ in range(4):
            before = max(world.live().number, world.served())
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            with slowed(learner, draw.uniform(0.01, 0.05)):
                fault.answers()
                published_and_served(world, learner, before)
            fault.version_served()
    assert learner.end(signal.SIGTERM) == 0


@contextmanager
def slowed(learner: ForkedLearner, slice_s: float) -> Iterator[None]:
    """Let it run for a tenth of the time, in slices."""
    done = threading.Event()

    def pace() -> None:
        while not done.is_set():
            learner.stop()
            time.sleep(9 * slice_s)
            learner.resume()
            time.sleep(slice_s)

    thread = threading.Thread(target=pace)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("what", "most"),
    [((Trainer, "step"), 60), ((Trainer, "export"), 3), ((Publisher, "publish"), 3)],
)
def test_a_learner_without_memory_ends_and_the_next_goes_on(
    world: World, what: tuple[type, str], most: int
) -> None:
    draw = random.Random(3)
    with world.fault(f"learner out of memory, in {what[1]}") as fault:
        for _ in range(4):
            before, steps = world.live() if world.served() else None, world.saved_steps()
            learner = world.start_learner(partial(run_out_of_memory, *what, draw.randint(1, most)))
            learner.process.join(120)
            fault.strikes()
            assert learner.process.exitcode == 2, learner.log()[-2000:]
            assert "ran out of memory" in learner.log()
            assert "Traceback" not in learner.log()
            fault.answers()
            if before is not None:
                assert world.live().sequence >= before.sequence
            assert world.saved_steps() >= steps
    after = world.served()
    learner = world.start_learner()
    published_and_served(world, learner, after)
    assert learner.end(signal.SIGTERM) == 0


def test_monitors_may_come_and_be_killed(world: World, tmp_path: Path) -> None:
    draw = random.Random(4)
    with world.fault("monitor killed") as fault:
        for i in range(6):
            log = tmp_path / f"{i}.jsonl"
            monitor = start_monitor(world, log)
            try:
                wait_for(lambda log=log: log.exists() and log.stat().st_size > 0)
                if i % 2:  # with a connection that nobody reads from any more
                    monitor.send_signal(signal.SIGSTOP)
                fault.await_moment(draw, within=1.0)
                fault.strikes()
            finally:
                monitor.kill()
                monitor.wait()
            fault.answers()
            lines = log.read_text().splitlines()
            assert all(json.loads(line)["problem"] is None for line in lines[:-1])


def start_monitor(world: World, log: Path) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "adaspec.cli.main", "monitor", world.server.url]
    words += ["--json", "--interval", "0.2", "--log", str(log)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def test_the_learners_sockets_may_come_and_go(world: World) -> None:
    """Only the sockets: whatever was half sent to one that went must not disturb the next."""
    draw = random.Random(5)
    with world.fault("learner's sockets gone and back") as fault:
        for _ in range(12):
            receiver = FeedbackReceiver(world.channel.feedback, world.lineage)
            try:
                wait_for(lambda r=receiver: r.receive(0.1) is not None)
                fault.await_moment(draw)
                fault.strikes()
            finally:
                receiver.close()
            fault.answers()
            with publishing(world) as publisher:
                publisher.publish_and_wait()
            fault.version_served()


def test_the_relay_may_be_killed(world: World) -> None:
    draw = random.Random(6)
    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.published > 0)
    with world.fault("feedback relay killed") as fault:
        for _ in range(4):
            relay = process_of(world, RELAY)
            assert relay is not None
            before = max(world.live().number, world.served())
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            relay.kill()
            fault.answers()
            wait_for(lambda killed=relay: process_of(world, RELAY) not in (killed, None))
            there = world.statuses.wait(learner).feedback.get("completed", 0)
            world.statuses.wait(learner, lambda s, n=there: s.feedback["completed"] > n)
            published_and_served(world, learner, before)
            fault.version_served()
    assert learner.end(signal.SIGTERM) == 0


def test_the_scheduler_may_be_paused(world: World) -> None:
    draw = random.Random(7)
    scheduler = process_of(world, "sglang::scheduler")
    assert scheduler is not None
    with publishing(world) as publisher, world.fault("scheduler paused") as fault:
        for _ in range(10):
            fault.await_moment(draw)
            scheduler.suspend()
            fault.strikes()
            try:
                # One that it finds when it wakes, or two of which it may never see the first.
                for _ in range(draw.randint(1, 2)):
                    number = publisher.publish()
                    time.sleep(draw.uniform(0.0, 1.5))
            finally:
                scheduler.resume()
            fault.answers()
            wait_for(lambda number=number: world.served() == number)
            fault.version_served()


def test_the_clock_may_jump(world: World) -> None:
    draw = random.Random(8)
    learner = world.start_learner(partial(trouble, world.troubles_file))
    world.statuses.wait(learner, lambda status: status.published > 0)
    day = 86_400.0
    with world.fault("clock jumps") as fault:
        for jump in [-10.0, 10.0, -day, day, 400 * day, -400 * day, *draw.choices([-99, 99], k=4)]:
            before = max(world.live().number, world.served())
            fault.await_moment(draw, within=1.0)
            fault.strikes()
            world.troubles.clock_s = jump * draw.uniform(0.5, 1.0)
            fault.answers()
            published_and_served(world, learner, before)
            fault.version_served()
        told = world.statuses.wait(learner)
        assert abs(told.time - time.time() - world.troubles.clock_s) < 5.0  # it did jump
    assert learner.end(signal.SIGTERM) == 0
