"""A decode step never waits for the GPU: the host prepares the next step while this one runs.

The online loop is on: its tap and its swaps must not wait either.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from adaspec.versions import open_writer
from tests.gpu.conftest import PROMPTS
from tests.gpu.fleet import Fleet
from tests.gpu.watched_server import Step, noted_waits, read_steps
from tests.server.launch import Server
from tests.server.online_loop import add_version, generate, swaps, wait_for

pytestmark = pytest.mark.gpu

BLOCK, LENGTH, LONG = 16, 40, 1500
REQUESTS = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "penalised": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 8},
    "biased": {"logit_bias": {"9": 2.0}},
    "with log-probabilities": {},
}


class Watched(NamedTuple):
    server: Server
    steps: Path
    directory: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.servers(name))
        for name in ("watched-graphs", "watched-eager", "watched-goodput")
    ],
)
def watched(request: pytest.FixtureRequest, fleet: Fleet, places: Path) -> Watched:
    directory = places / request.param
    return Watched(fleet.server(request.param), directory / "steps.jsonl", directory)


def send(server: Server, kind: str, label: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True, **REQUESTS[kind]}

    def one(number: int) -> None:
        server.generate(
            rid=f"{label} {number}",
            input_ids=PROMPTS[number],
            sampling_params=sampling,
            return_logprob=kind == "with log-probabilities",
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))


@pytest.mark.parametrize("kind", list(REQUESTS))
def test_no_decode_step_waits(watched: Watched, kind: str) -> None:
    send(watched.server, kind, f"{kind}: first")  # kernels compile and buffers grow
    send(watched.server, kind, f"{kind}: then")
    steps = [
        step
        for step in read_steps(watched.steps)
        if all(request.startswith(f"{kind}: then") for request in step.requests)
    ]
    assert len(steps) >= LENGTH / BLOCK
    refuse_waits(steps)


def test_no_swap_waits(watched: Watched, drafter: Path) -> None:
    writer = open_writer(watched.directory / "store", drafter)
    number = add_version(writer, drafter)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, watched.server, PROMPTS[0], "swapped", LONG)
        wait_for(lambda: read_steps(watched.steps)[-1].requests == ["swapped"])
        writer.point(number, "published by a test")
        answer.result()
    writer.close()
    assert swaps(watched.server) == [(0, number)]
    wait_for(lambda: "is served as published" in watched.server.log())
    steps = [step for step in read_steps(watched.steps) if step.requests == ["swapped"]]
    first = next(i for i, step in enumerate(steps) if step.version == number)
    assert first > 0  # between two steps of one request
    refuse_waits(steps[: first + 1])


def refuse_waits(steps: list[Step]) -> None:
    waits = [wait for step in steps for wait in step.waits]
    assert not waits, f"{len(waits)} waits in {len(steps)} steps, the first:\n{waits[0]}"


def test_the_watch_notices_a_wait() -> None:
    with noted_waits() as waits:
        torch.ones(1, device="cuda").item()
    assert len(waits) == 1
    assert "test_the_watch_notices_a_wait" in waits[0]
