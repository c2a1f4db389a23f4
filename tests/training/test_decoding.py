"""Batched decoding against transformers' own, prompt by prompt."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from adaspec.training.config import GenerateSection
from adaspec.training.decoding import SEGMENT_STEPS, decode_all, plan_waves
from adaspec.training.target_model import TargetModel
from tests.server.tiny_models import EOS

PROMPTS = [
    [5],
    [6, 7],
    [8, 9, 10, 11, 12],
    [13 + i for i in range(17)],
    [200 - i for i in range(9)],
]
NEW_TOKENS = SEGMENT_STEPS + 20  # more than one segment


def decode(
    target: TargetModel, prompts: list[list[int]], config: GenerateSection
) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}

    def finish(index: int, response: list[int]) -> None:
        assert index not in found
        found[index] = response

    decode_all(target, prompts, config, finish)
    return found


@pytest.fixture(scope="module")
def model(target_directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target_directory).eval()


def generate(model: LlamaForCausalLM, prompt: list[int], ends: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=ends,
        pad_token_id=EOS,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_greedy_answers_are_those_of_transformers(
    target: TargetModel, model: LlamaForCausalLM, rows: int
) -> None:
    config = GenerateSection(max_new_tokens=NEW_TOKENS, batch_rows=rows)
    found = decode(target, PROMPTS, config)
    assert found == {i: generate(model, prompt, [EOS]) for i, prompt in enumerate(PROMPTS)}
    assert max(map(len, found.values())) > SEGMENT_STEPS


def test_answers_stop_at_any_end_token(target: TargetModel, model: LlamaForCausalLM) -> None:
    free = generate(model, PROMPTS[2], [EOS])
    ends = [EOS, free[10]]
    ending = copy.copy(target.config)
    ending.eos_token_id = ends
    found = decode(
        replace(target, config=ending), PROMPTS, GenerateSection(max_new_tokens=NEW_TOKENS)
    )
    assert found == {i: generate(model, prompt, ends) for i, prompt in enumerate(PROMPTS)}
    assert len(found[2]) <= 11
    assert found[2][-1] in ends


def test_sampled_tokens_follow_the_target(target: TargetModel) -> None:
    torch.manual_seed(0)
    draws, temperature = 4000, 0.8
    config = GenerateSection(
        max_new_tokens=1, temperature=temperature, batch_rows=draws, cache_tokens=10**7
    )
    found = decode(target, [PROMPTS[2]] * draws, config)
    final = target.decoder(input_ids=torch.tensor([PROMPTS[2]])).last_hidden_state[:, -1]
    law = (target.logits(final)[0].double() / temperature).softmax(-1)
    likely = law.topk(12).indices
    counts = torch.bincount(torch.tensor([found[i][0] for i in range(draws)]), minlength=len(law))
    observed = torch.cat([counts[likely], (draws - counts[likely].sum())[None]])
    expected = torch.cat([law[likely], (1 - law[likely].sum())[None]]) * draws
    assert chisquare(observed.double(), expected.detach()).pvalue > 1e-3


def test_stopping_leaves_whole_waves_out(target: TargetModel) -> None:
    found: dict[int, list[int]] = {}
    decode_all(
        target,
        PROMPTS,
        GenerateSection(max_new_tokens=4, batch_rows=2),
        found.__setitem__,
        stop=lambda: len(found) >= 2,
    )
    assert set(found) == {0, 1}  # the shortest first


def test_waves_respect_both_limits_and_miss_nothing() -> None:
    lengths = [(7 * i) % 50 + 1 for i in range(60)]
    config = GenerateSection(max_new_tokens=36, batch_rows=8, cache_tokens=1000)
    waves = plan_waves(lengths, config)
    assert sorted(i for wave in waves for i in wave) == list(range(60))
    assert max(map(len, waves)) == 8
    for wave in waves:
        assert len(wave) * (max(lengths[i] for i in wave) + 100) <= 1000


def test_a_prompt_too_long_for_the_cache_is_a_wave_of_its_own() -> None:
    waves = plan_waves([5000, 10], GenerateSection(cache_tokens=1000))
    assert waves == [[1], [0]]
