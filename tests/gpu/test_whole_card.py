"""SmolLM2 served at SGLang's default memory fraction, with a learner on the same GPU."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.equality import GreedyAnswer, find_partings, greedy_answers
from adaspec.load.prompts import load_prompts
from adaspec.target.smollm2 import ensure_smollm2
from tests.gpu.fleet import Fleet
from tests.server.online_loop import Learner, metric, swaps, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.servers("smollm2", "smollm2-online")]

TOKENS = 96
# Overfits a few prompts that come again and again, so that the gate has something to publish.
SETTINGS = """\
[process]
device = "cuda"
[replay]
held_back = 0.25
fresh = 4
[batch]
trajectories = 4
blocks = 16
passes = 20.0
[optimiser]
learning_rate = 1e-3
[gate]
every_steps = 30
max_requests = 16
passes = 8
tolerance = 0.1
"""
# Bfloat16 logits near 16 to 32 are 0.125 apart, and either logit may be off by one step.
NEAR_TIE = 0.3  # nats


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(ensure_smollm2(progress=print))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in load_prompts()[:8]
    ]


@pytest.fixture
def learner(places: Path) -> Iterator[Learner]:
    process = Learner(
        BUNDLED_DRAFTER, ensure_smollm2(progress=print), places / "smollm2-online", SETTINGS
    )
    yield process
    process.close()


def tokens_per_pass(answers: list[GreedyAnswer]) -> float:
    return sum(len(a.tokens) for a in answers) / sum(a.target_passes for a in answers)


def test_a_learner_shares_the_card(
    fleet: Fleet, learner: Learner, prompts: list[list[int]]
) -> None:
    plain = greedy_answers(
        fleet.server("smollm2").url, prompts, max_tokens=TOKENS, concurrency=1, top_logprobs=5
    )
    server = fleet.server("smollm2-online")
    free, total = torch.cuda.mem_get_info()
    assert free < total / 4  # the KV pool has taken the card

    def answer() -> list[GreedyAnswer]:
        answers = greedy_answers(server.url, prompts, max_tokens=TOKENS, concurrency=4)
        partings = find_partings(plain, answers)
        assert all(p.gap is not None and p.gap < NEAR_TIE for p in partings), partings
        return answers

    def serve_until_swapped() -> bool:
        answer()
        return len(swaps(server)) > 0

    static = tokens_per_pass(answer())
    started = len(server.log())
    learner.start()
    try:
        wait_for(serve_until_swapped, 150)
        assert tokens_per_pass(answer()) > static
        # Weights are compared between control windows, which come and go with the traffic.
        wait_for(lambda: bool(answer()) and "is served as published" in server.log(), 60)
    finally:
        code = learner.end(signal.SIGTERM)
        print(learner.log()[-6000:])
    assert code == 0
    assert "learning on cuda:0" in learner.log()
    assert "Traceback" not in learner.log()
    log = server.log()[started:]
    assert "not the published ones" not in log
    assert "out of memory" not in log.lower()
    assert "Traceback" not in log
    assert metric(server, "adaspec_feedback_records_total", outcome="sent") > 0
