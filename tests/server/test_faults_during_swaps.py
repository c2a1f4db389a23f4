"""Swaps at every bad moment of a server whose memory is short: outputs stay the target's own.

One server for all tests, so small that prompts are chunked, requests retracted and prefixes evicted
all the time; every answer is compared.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server.fault_world import Load, World, publishing, running_world
from tests.server.online_loop import metric, wait_for
from tests.server.watched_swaps import NOTES_VARIABLE, SwapNote, read_notes

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(600)]

TIMES = 12
SMALL = ("--max-total-tokens", "1024", "--chunked-prefill-size", "48")
SMALL += ("--schedule-conservativeness", "0.1", "--max-running-requests", "12")
LOAD = Load(prompts=32, shared=40, own=80, tokens=80, in_flight=12)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("notes") / "swaps"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES_VARIABLE, str(path))
        yield path


@pytest.fixture(scope="module")
def world(
    tiny_target: Path, tiny_drafter: Path, notes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("swaps")
    module = "tests.server.watched_swaps"
    with running_world(
        tiny_target, tiny_drafter, directory, *SMALL, load=LOAD, module=module
    ) as world:
        yield world
        # Whatever became of requests, their KV slots are free again.
        with world.traffic.held():
            world.server.flush_cache()
            wait_for(lambda: metric(world.server, "sglang:token_usage") == 0)


def test_swaps_amid_chunks_retractions_and_evictions(world: World, notes: Path) -> None:
    draw = random.Random(1)

    def is_amid(before: SwapNote | None, now: SwapNote) -> dict[str, bool]:
        return {
            "swap between two chunks of a prompt": now.chunked,
            "swap with retracted requests waiting": now.retracted > 0,
            "swap while prefixes are evicted": before is not None and now.evicted > before.evicted,
        }

    with publishing(world) as publisher, ExitStack() as stack:
        before = None
        number = publisher.publish_and_wait()
        names = is_amid(before, read_notes(notes)[number])
        faults = {name: stack.enter_context(world.fault(name)) for name in names}
        met = dict.fromkeys(faults, 0)
        deadline = time.monotonic() + 300
        while min(met.values()) < TIMES:
            assert time.monotonic() < deadline, f"not every moment was met {TIMES} times: {met}"
            time.sleep(draw.uniform(0.0, 0.3))
            number = publisher.publish_and_wait()
            now = read_notes(notes)[number]
            struck = [name for name, holds in is_amid(before, now).items() if holds]
            before = now
            for name in struck:
                met[name] += 1
                faults[name].strikes()
            for name in struck:
                faults[name].answers()


Break = Callable[[World, random.Random, str, threading.Event], None]


def disconnect(world: World, draw: random.Random, rid: str, swapping: threading.Event) -> None:
    """Go away in the middle of a stream, after a random number of its pieces."""
    prompt, expected = world.traffic.draw(draw)
    body = request(prompt, rid, len(expected)) | {"stream": True}
    pieces = draw.randrange(0, 8)
    with httpx.stream("POST", f"{world.server.url}/generate", json=body, timeout=120) as response:
        swapping.wait(60)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                output = json.loads(line.removeprefix("data: "))["output_ids"]
                assert output == expected[: len(output)]
                pieces -= 1
            if pieces < 0:
                return


def abort(world: World, draw: random.Random, rid: str, swapping: threading.Event) -> None:
    """Call a request off after a random time."""
    prompt, expected = world.traffic.draw(draw)
    delay = draw.uniform(0.0, 0.5)

    def call_off() -> None:
        swapping.wait(60)
        time.sleep(delay)
        httpx.post(f"{world.server.url}/abort_request", json={"rid": rid}, timeout=60)

    caller = threading.Thread(target=call_off)
    caller.start()
    answer = world.server.generate(**request(prompt, rid, len(expected)))
    caller.join()
    output = answer["output_ids"]
    assert output == expected[: len(output)]
    assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")


def request(prompt: list[int], rid: str, length: int) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    return {"input_ids": prompt, "rid": rid, "sampling_params": sampling}


@pytest.mark.parametrize(
    ("name", "how"),
    [("clients disconnect during a swap", disconnect), ("requests aborted during a swap", abort)],
)
def test_requests_broken_off_during_a_swap(world: World, name: str, how: Break) -> None:
    draw = random.Random(2)
    problems: list[str] = []

    def break_off(seed: int, rid: str, swapping: threading.Event) -> None:
        try:
            how(world, random.Random(seed), rid, swapping)
        except (AssertionError, httpx.HTTPError) as error:
            problems.append(repr(error))

    with publishing(world) as publisher, world.fault(name) as fault:
        for turn in range(TIMES):
            swapping = threading.Event()
            breakers = [
                threading.Thread(
                    target=break_off, args=(draw.random(), f"{how.__name__}-{turn}-{i}", swapping)
                )
                for i in range(4)
            ]
            for breaker in breakers:
                breaker.start()
            fault.await_moment(draw)
            number = publisher.publish()
            fault.strikes()
            swapping.set()
            wait_for(lambda number=number: world.served() == number)
            fault.version_served()
            for breaker in breakers:
                breaker.join(120)
                assert not breaker.is_alive(), "a request that was broken off did not end"
            fault.answers()
        assert problems == []
