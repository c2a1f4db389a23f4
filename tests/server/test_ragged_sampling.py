"""Sampling keeps the target's distribution when verify lengths are drawn anew in every step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.erratic_server import OUTCOMES_VARIABLE, read_outcomes
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.test_adaspec_sampling import (  # noqa: F401
    PROMPT,
    sharp_target,
    test_the_joint_law_of_the_first_tokens_is_the_targets,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(
    sharp_target: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("sampling")
    drafter = write_fitted_drafter(
        directory / "drafter", sharp_target, [PROMPT], length=10, temperature=0.7, copies=16
    )
    outcomes = directory / "outcomes.jsonl"
    outcomes.touch()
    spec = ServerSpec(
        target=str(sharp_target),
        port=free_port(),
        drafter=str(drafter),
        extra=("--random-seed", "7", "--max-running-requests", "64"),
        environment={OUTCOMES_VARIABLE: str(outcomes)},
    )
    log = directory / "server.log"
    with start_server(
        spec, log=log, command=command(spec, "tests.server.erratic_server")
    ) as process:
        process.wait_until_healthy(300)
        yield Server(process.url, log)
    ragged = [outcome for outcome in read_outcomes(outcomes) if len(set(outcome.lengths or ())) > 2]
    assert len(ragged) > 100
