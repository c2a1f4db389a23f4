"""On a GPU, ADASPEC's greedy answers are those of plain decoding."""

import pytest

from adaspec.load.equality import GreedyAnswer, find_partings, greedy_answers
from tests.gpu.conftest import PROMPTS
from tests.gpu.fleet import Fleet

SPECULATIVE = ("verify-16", "verify-5", "verify-1", "goodput")
pytestmark = pytest.mark.gpu

TOKENS = 40
LONG = [[3 + (i * step) % 200 for i in range(150)] for step in (7, 11)]  # three prefill chunks
# A verify pass rounds otherwise than a decode step, and bfloat16 logits near 16 to 32 are 0.125
# apart: either logit may be off by one step.
NEAR_TIE = 0.3  # nats


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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.servers("plain", n)) for n in SPECULATIVE]
)
def test_greedy_answers_are_those_of_plain_decoding(
    plain: list[GreedyAnswer], fleet: Fleet, name: str
) -> None:
    runs = [answers(fleet, name, concurrency) for concurrency in (1, 8)]
    for run in runs:
        partings = find_partings(plain, run)
        assert all(p.gap is not None and p.gap < NEAR_TIE for p in partings), partings
    if name != "verify-1":
        asked = [answer for run in runs for answer in run[: len(PROMPTS)]]
        passes = sum(answer.target_passes for answer in asked)
        assert passes < 0.8 * sum(len(answer.tokens) for answer in asked)
