"""After steps without drafts, and after ragged ones, the drafter's context is complete: the served
drafts are those of `adaspec.drafters.BlockDrafter` on the whole sequence.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from adaspec.drafters.checkpoint import load_drafter
from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.erratic_server import OUTCOMES_VARIABLE, Outcome, read_outcomes
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.recording_server import RECORDS_VARIABLE, read_passes
from tests.server.reference import ReferenceModel
from tests.server.test_drafter_equality import (
    LONG,
    PROMPTS,
    SHORT,
    TOLERANCE,
    Recording,
    difference,
    generate,
    to_blocks,
    trained,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ROUNDS = 4


class Served(NamedTuple):
    recording: Recording
    outcomes: list[Outcome]


@pytest.fixture(scope="module")
def served(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("catch-up")
    drafter = write_fitted_drafter(directory / "drafter", tiny_target, SHORT)
    records, outcomes = directory / "records", directory / "outcomes.jsonl"
    records.mkdir()
    outcomes.touch()
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        extra=("--chunked-prefill-size", "64", "--skip-server-warmup"),
        environment={RECORDS_VARIABLE: str(records), OUTCOMES_VARIABLE: str(outcomes)},
    )
    log = directory / "server.log"
    answers: dict[str, dict] = {}
    with start_server(
        spec, log=log, command=command(spec, "tests.server.erratic_server")
    ) as process:
        process.wait_until_healthy(300)
        server = Server(process.url, log)
        for _ in range(ROUNDS):  # later rounds find earlier answers in the prefix cache
            with ThreadPoolExecutor(len(SHORT)) as pool:
                answers |= pool.map(lambda rid: (rid, generate(server, rid)), list(PROMPTS)[:4])
            for rid in ("long", "long-again"):
                answers[rid] = generate(server, rid)
    assert answers["long-again"]["meta_info"]["cached_tokens"] >= len(LONG)
    sequences = {rid: PROMPTS[rid] + answers[rid]["output_ids"] for rid in PROMPTS}
    target = ReferenceModel(tiny_target)
    passes = read_passes(records)
    blocks = to_blocks(passes, sequences, target)
    recording = Recording(blocks, passes, target, load_drafter(drafter))
    return Served(recording, read_outcomes(outcomes))


def test_there_was_something_to_catch_up_with(served: Served) -> None:
    outcomes = served.outcomes
    plain_before = [
        before.requests == after.requests and not before.drafted and after.drafted
        for before, after in pairwise(outcomes)
    ]
    assert sum(plain_before) > 5
    assert sum(len(set(outcome.lengths or ())) > 1 for outcome in outcomes) > 5


def test_drafts_are_those_of_the_whole_context(served: Served) -> None:
    recording = served.recording
    assert len(recording.blocks) > 100
    for block in recording.blocks:
        expected = trained(recording, block)
        assert difference(block.served, expected) < TOLERANCE
        assert block.drafted == expected[1 : len(block.drafted) + 1].argmax(-1).tolist()


def test_the_policy_is_told_the_drafters_own_probabilities(served: Served) -> None:
    lm_head = served.recording.target.model.lm_head.weight.detach()
    drafted = [outcome for outcome in served.outcomes if outcome.drafted]
    compared = 0
    for step, outcome in zip(served.recording.passes, drafted, strict=False):
        assert step.request == outcome.requests
        read = len(outcome.log_probs[0])
        expected = (step.hidden[:, 1 : read + 1] @ lm_head.T).log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(outcome.log_probs), expected, rtol=1e-4, atol=1e-5)
        compared += expected.numel()
    assert compared > 500
