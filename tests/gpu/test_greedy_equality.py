"""On a GPU, ADASPEC's greedy answers are those of plain decoding."""

import pytest

from adaspec.load.equality import GreedyAnswer, find_partings, greedy_answers
from tests.gpu.conftest import PROMPTS
from tests.gpu.fleet import Fleet

LENGTHS = (6, 3, 1)
pytestmark = [pytest.mark.gpu, pytest.mark.servers("plain", *(f"verify-{n}" for n in LENGTHS))]

TOKENS = 40
LONG = [[3 + (i * step) % 200 for i in range(150)] for step in (7, 11)]  # three prefill chunks
# Triton multiplies float32 in TF32, and a verify pass sums in another order than a decode step.
NEAR_TIE = 0.05  # nats


def answers(fleet: Fleet, name: str, concurrency: int) -> list[GreedyAnswer]:
    return greedy_answers(
        fleet.server(name).url,
        PROMPTS + LONG,
        max_tokens=TOKENS,
        concurrency=concurrency,
        top_logprobs=5,
    )


@pytest.fixture(scope="module")
def plain(fleet: Fleet) -> list[GreedyAnswer]:
    return answers(fleet, "plain", 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_answers_are_those_of_plain_decoding(
    plain: list[GreedyAnswer], fleet: Fleet, length: int
) -> None:
    runs = [answers(fleet, f"verify-{length}", concurrency) for concurrency in (1, 8)]
    for run in runs:
        partings = find_partings(plain, run)
        assert all(p.gap is not None and p.gap < NEAR_TIE for p in partings), partings
        assert len(partings) <= len(plain) // 4, partings
    if length > 1:
        fitted = runs[0][: len(PROMPTS)]
        passes = sum(answer.target_passes for answer in fitted)
        assert passes < 0.8 * sum(len(answer.tokens) for answer in fitted)
