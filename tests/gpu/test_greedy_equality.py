"""On a GPU, ADASPEC's greedy answers are those of plain decoding."""

from pathlib import Path

import pytest

from adaspec.load.equality import GreedyAnswer, find_partings, greedy_answers
from adaspec.load.launch import ServerSpec, free_port, running_server
from tests.gpu.conftest import PROMPTS, SERVER_ARGUMENTS

pytestmark = pytest.mark.gpu

LENGTH = 40
LONG = [[3 + (i * step) % 200 for i in range(150)] for step in (7, 11)]  # three prefill chunks
# Triton multiplies float32 in TF32, and a verify pass sums in another order than a decode step.
NEAR_TIE = 0.05  # nats


def answers(
    target: Path, log: Path, concurrencies: tuple[int, ...], **changes: object
) -> list[list[GreedyAnswer]]:
    """The answers of one server to all prompts, once for every concurrency."""
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        dtype="float32",
        extra=SERVER_ARGUMENTS,
        **changes,  # type: ignore[arg-type]
    )
    with running_server(spec, log=log, timeout_s=500) as server:
        return [
            greedy_answers(
                server.url, PROMPTS + LONG, max_tokens=LENGTH, concurrency=n, top_logprobs=5
            )
            for n in concurrencies
        ]


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[GreedyAnswer]:
    (alone,) = answers(target, tmp_path_factory.mktemp("plain") / "server.log", (1,))
    return alone


@pytest.mark.parametrize("length", [6, 3, 1])
def test_greedy_answers_are_those_of_plain_decoding(
    plain: list[GreedyAnswer], target: Path, drafter: Path, tmp_path: Path, length: int
) -> None:
    config = tmp_path / "adaspec.toml"
    config.write_text(f"[verify]\nlength = {length}\n")
    log = tmp_path / "server.log"
    runs = answers(target, log, (1, 8), drafter=str(drafter), config=config)
    for run in runs:
        partings = find_partings(plain, run)
        assert all(p.gap is not None and p.gap < NEAR_TIE for p in partings), partings
        assert len(partings) <= len(plain) // 4, partings
    if length > 1:
        fitted = runs[0][: len(PROMPTS)]
        passes = sum(answer.target_passes for answer in fitted)
        assert passes < 0.8 * sum(len(answer.tokens) for answer in fitted)
