"""Whatever happens to the learner or its files, serving goes on, with the target's own outputs.

One server for all tests, requests in flight all the time, every answer compared. Each test starts
learners of its own on the store that the tests before have left.
"""

import random
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from adaspec.feedback import BlockRecord, ContextRecord, FeedbackSender, TopKTeacher
from adaspec.versions import VersionStore
from online.state import load_state
from tests.server import tiny_models as tiny
from tests.server.damages import DAMAGES, flip_a_bit
from tests.server.fault_world import (
    QUEUE_BYTES,
    World,
    publishing,
    wait_for_refusal,
)
from tests.server.harms import break_gradients
from tests.server.online_loop import add_version, metric, refusals, wait_for

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(600)]


def test_a_learner_may_be_killed_at_any_moment(world: World) -> None:
    def newest() -> int:
        return max(VersionStore(world.store).numbers())

    def not_live_yet() -> bool:
        """A version is complete, but the pointer has not moved."""
        return newest() > max(newest_before, VersionStore(world.store).current().number)

    def scratch(directory: Path, pattern: str) -> Callable[[], bool]:
        return lambda: any(directory.glob(pattern))

    writing = scratch(world.store / "versions", ".*")
    moving = scratch(world.store, ".CURRENT.*")
    saving = scratch(world.store / "learner", ".*")
    # From when to look closely, and when to kill.
    moments = [
        (writing, writing),
        (writing, not_live_yet),
        (not_live_yet, moving),
        (saving, saving),
    ]
    first = world.start_learner()
    world.statuses.wait(first, lambda status: status.published > 0)
    wait_for(lambda: world.saved_steps() > 0)
    first.end(signal.SIGKILL)
    draw = random.Random(1)
    with world.fault("learner killed") as fault:
        for moment in [*moments, *[None] * 6]:
            before, steps, newest_before = world.live(), world.saved_steps(), newest()
            learner = world.start_learner()
            resumed = world.statuses.wait(learner)
            assert resumed.steps >= steps
            assert resumed.sequence >= before.sequence
            if moment is None:
                # From start-up over training and judging to the first publications.
                world.traffic.wait(draw.randrange(1, 20))
                learner.end(signal.SIGKILL)
            else:
                learner.kill_when(*moment)
                assert moment[1]()
            fault.strikes()
            assert world.live().sequence >= before.sequence
            assert world.saved_steps() >= steps
            fault.answers()
        newest_before = newest()
        last = world.start_learner()
        published = world.statuses.wait(last, lambda status: status.live_version > newest_before)
        assert published.steps >= world.saved_steps() > 0
        wait_for(lambda: world.served() > newest_before)
        fault.version_served()
    assert last.end(signal.SIGTERM) == 0
    assert not any(left_over() for left_over in (writing, moving, saving))


def test_a_learner_that_hangs_costs_the_server_nothing_but_feedback(world: World) -> None:
    draw = random.Random(2)

    def serve_long_prompts(count: int) -> None:
        """Each leaves three quarters of a megabyte of feedback."""
        for _ in range(count):
            prompt = [draw.randrange(3, tiny.VOCAB_SIZE) for _ in range(1500)]
            sampling = {"temperature": 0, "max_new_tokens": 2}
            world.server.generate(input_ids=prompt, sampling_params=sampling)

    def dropped() -> float:
        reasons = ("queue-full", "pressure", "gap")
        return sum(metric(world.server, DROPPED, outcome=reason) for reason in reasons)

    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.feedback.get("completed", 0) > 0)
    serve_long_prompts(10)
    lost, memory = dropped(), server_memory(world)
    with world.fault("learner hung") as fault:
        learner.stop()
        fault.strikes()
        fault.answers()
        served = world.traffic.served
        serve_long_prompts(80)
        assert world.traffic.served > served
        assert server_memory(world) - memory < 5 * QUEUE_BYTES < 80 * 1500 * 512
        wait_for(lambda: dropped() > lost)
    hung = world.statuses.wait
    learner.resume()
    awake = hung(learner)
    hung(
        learner,
        lambda status: (
            status.steps > awake.steps
            and status.feedback["completed"] > awake.feedback["completed"]
        ),
    )
    world.traffic.wait(10)


DROPPED = "adaspec_feedback_records_total"


def server_memory(world: World) -> int:
    """Resident bytes of all processes of the server."""
    root = psutil.Process(world.process.process.pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


def test_a_full_disk_stops_publication_and_nothing_else(world: World) -> None:
    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.steps > 0)
    _, hard = resource.prlimit(learner.pid, resource.RLIMIT_FSIZE)
    full = world.statuses.wait(learner)
    with world.fault("disk full for the learner") as fault:
        # No file may grow beyond this: the kernel refuses the weights of a version and of a state.
        resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (100_000, hard))
        fault.strikes()
        fault.answers()
    live = world.live()
    numbers = VersionStore(world.store).numbers()
    wait_for(lambda: bool(re.search(r"version \d+ could not be written", learner.log())), 120)
    wait_for(lambda: "the learner's state could not be written" in learner.log())
    failed = world.statuses.wait(learner, lambda status: status.failures >= full.failures + 2)
    later = world.statuses.wait(learner, lambda status: status.steps >= failed.steps + 20)
    assert later.live_version == live.number
    assert world.live() == live
    assert VersionStore(world.store).numbers() == numbers
    world.traffic.wait(10)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (hard, hard))
    world.statuses.wait(learner, lambda status: status.live_version > live.number)
    wait_for(lambda: world.served() > live.number)
    assert learner.end(signal.SIGTERM) == 0
    assert world.saved_steps() > later.steps


def test_a_learner_survives_bad_gradients(world: World) -> None:
    begin = world.saved_steps() + 5
    learner = world.start_learner(partial(break_gradients, begin, begin + 40))
    broken = world.statuses.wait(learner, lambda status: status.skipped_steps >= 20)
    with world.fault("NaN gradients") as fault:
        fault.strikes()
        fault.answers()
    after = world.statuses.wait(learner, lambda status: status.steps > broken.steps + 10)
    assert after.skipped_steps >= 40
    assert after.loss is not None
    world.statuses.wait(learner, lambda status: status.published > after.published)
    world.live()
    assert learner.end(signal.SIGTERM) == 0
    saved = load_state(world.store / "learner", world.lineage, "frozen-kv")
    assert saved is not None
    assert all(bool(t.isfinite().all()) for t in saved.tensors.values())
    world.traffic.wait(10)


def test_poisoned_feedback_is_refused(world: World) -> None:
    learner = world.start_learner()
    status = world.statuses.wait(learner, lambda status: status.steps > 0)
    before = status.feedback.get("misfits", 0)
    sender = FeedbackSender(world.channel.feedback)
    bad = [float("nan"), float("inf"), -float("inf"), 1e30, -3e38]
    with world.fault("poisoned feedback") as fault:
        for i, value in enumerate(bad):
            context, block = honest_records(world, f"taps-{i}")
            taps = context.taps.index_fill(0, torch.tensor([1]), value)
            sender.offer(replace(context, taps=taps))
            context, block = honest_records(world, f"teacher-{i}")
            assert isinstance(block.teacher, TopKTeacher)
            logits = torch.full_like(block.teacher.logits, value)
            sender.offer(context)
            sender.offer(replace(block, teacher=replace(block.teacher, logits=logits)))
            fault.strikes()
            fault.answers()
    refused = world.statuses.wait(
        learner, lambda status: status.feedback.get("misfits", 0) >= before + 2 * len(bad)
    )
    sender.close()
    after = world.statuses.wait(learner, lambda status: status.steps > refused.steps + 20)
    assert after.feedback["misfits"] == before + 2 * len(bad)
    assert after.skipped_steps == status.skipped_steps
    world.traffic.wait(10)


def honest_records(world: World, request: str) -> tuple[ContextRecord, BlockRecord]:
    """A request of three prompt tokens and one step, as the server might send it."""
    width = tiny.HIDDEN * len(tiny.TAPS)
    tokens = torch.tensor([5, 6, 7], dtype=torch.int32)
    context = ContextRecord(world.lineage, request, 0, 0, 0, tokens, torch.ones(3, width))
    teacher = TopKTeacher(
        torch.tensor([[2.0, 1.0]]), torch.tensor([[8, 9]], dtype=torch.int32), torch.tensor([3.0])
    )
    block = BlockRecord(
        lineage=world.lineage,
        request=request,
        number=1,
        version=0,
        start=3,
        temperature=0.0,
        verify_lengths=(2,),
        accepted=(0,),
        token_ids=torch.tensor([10, 11], dtype=torch.int32),
        drafts=torch.tensor([12], dtype=torch.int32),
        taps=torch.ones(1, width),
        teacher=teacher,
        teacher_rows="committed",
    )
    return context, block


def test_a_damaged_version_is_refused_and_the_next_good_one_served(world: World) -> None:
    with publishing(world) as publisher, world.fault("damaged version or pointer") as fault:
        writer = publisher.writer
        live = publisher.publish_and_wait()

        def assert_refused(reason: str, write: Callable[[], object]) -> None:
            before = len(refusals(world.server))
            fault.strikes()
            write()
            wait_for_refusal(world, before, reason)
            fault.answers()
            assert world.served() == live

        for damage, reason in DAMAGES.values():
            number = add_version(writer, world.drafter)
            damage(writer.path(number))
            assert_refused(reason, partial(publisher.point, number))
        live = publisher.publish_and_wait()
        whole = writer.current()
        foreign = msgspec.structs.replace(whole, lineage="f" * 16, sequence=whole.sequence + 1)
        torn = msgspec.json.encode(whole)[:40]
        for content, reason in ((torn, "is damaged"), (msgspec.json.encode(foreign), "f" * 16)):
            assert_refused(reason, partial(publisher.write_pointer, content))
        publisher.write_pointer(msgspec.json.encode(whole))
        live = publisher.publish_and_wait()

    # Now the live version itself: the server has it in memory, a learner that starts has not.
    flip_a_bit(writer.path(live))
    learner = world.start_learner()
    world.statuses.wait(learner, lambda status: status.steps > 0)
    assert "the live version is damaged, the base takes its place" in learner.log()
    wait_for(lambda: world.served() == world.live().number != live)
    world.traffic.wait(10)
