"""A decode step never waits for the GPU: the host prepares the next step while this one runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.gpu.conftest import PROMPTS, SERVER_ARGUMENTS
from tests.gpu.watched_server import STEPS_VARIABLE, noted_waits, read_steps
from tests.server.instrumented import command
from tests.server.launch import Server

pytestmark = pytest.mark.gpu

LENGTH = 40
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


@pytest.fixture(scope="module", params=["graphs", "eager"])
def watched(
    request: pytest.FixtureRequest,
    target: Path,
    drafter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    eager = ("--cuda-graph-backend-decode", "disabled") if request.param == "eager" else ()
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        extra=(*SERVER_ARGUMENTS, *eager),
        environment={STEPS_VARIABLE: str(directory / "steps.jsonl")},
    )
    log = directory / "server.log"
    with start_server(spec, log=log, command=command(spec, "tests.gpu.watched_server")) as process:
        process.wait_until_healthy(500)
        yield Watched(Server(process.url, log), directory / "steps.jsonl")


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
    assert len(steps) >= LENGTH / 6
    waits = [wait for step in steps for wait in step.waits]
    assert not waits, f"{len(waits)} waits in {len(steps)} steps, the first:\n{waits[0]}"


def test_the_watch_notices_a_wait() -> None:
    with noted_waits() as waits:
        torch.ones(1, device="cuda").item()
    assert len(waits) == 1
    assert "test_the_watch_notices_a_wait" in waits[0]
