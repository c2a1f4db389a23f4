"""Sampling through a server keeps the target's distribution: chi-square over 20,000 draws."""

import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare

from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.launch import Server, serve
from tests.server.reference import ReferenceModel

pytestmark = pytest.mark.server

PROMPT = [5, 44, 87, 17, 61]
DRAWS = 20_000
TOKENS = 3
ANSWERS_PER_REQUEST = 100
RARE = 2e-5  # continuations below this probability are pooled


@pytest.fixture(scope="module")
def sharp_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with logits three times as far apart: a few tokens hold most of the mass."""
    directory = tmp_path_factory.mktemp("sharp") / "target"
    shutil.copytree(tiny_target, directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 3.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def server(sharp_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("sampling")
    drafter = write_fitted_drafter(
        directory / "drafter", sharp_target, [PROMPT], length=10, temperature=0.7, copies=16
    )
    arguments = ("--speculative-algorithm", "ADASPEC", "--speculative-draft-model-path")
    arguments += (str(drafter), "--random-seed", "7", "--max-running-requests", "64")
    with serve(sharp_target, *arguments, log_path=directory / "server.log") as running:
        yield running


def exact_law(
    reference: ReferenceModel, temperature: float, top_p: float
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `TOKENS` tokens that plain sampling can give."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for start, probability in law.items():
            logits = reference.logits(PROMPT + list(start)).double() / temperature
            probs, tokens = logits.softmax(-1).sort(descending=True)
            kept = (probs.cumsum(-1) - probs) <= top_p
            weights = probs * kept / (probs * kept).sum()
            for token, weight in zip(tokens[kept].tolist(), weights[kept].tolist(), strict=True):
                if probability * weight > RARE:
                    longer[(*start, token)] = probability * weight
        law = longer
    return law


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.0, 0.8), (1.0, 1.0)])
def test_the_joint_law_of_the_first_tokens_is_the_targets(
    server: Server, sharp_target: Path, temperature: float, top_p: float
) -> None:
    torch.set_num_threads(1)
    law = exact_law(ReferenceModel(sharp_target), temperature, top_p)
    params = {"temperature": temperature, "top_p": top_p, "max_new_tokens": TOKENS}
    params |= {"ignore_eos": True, "n": ANSWERS_PER_REQUEST}

    def draw(_: int) -> list[dict]:
        return server.generate(input_ids=PROMPT, sampling_params=params)

    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(draw, range(DRAWS // ANSWERS_PER_REQUEST)))
    answers = [answer for batch in batches for answer in batch]
    observed = Counter(tuple(answer["output_ids"]) for answer in answers)
    assert sum(observed.values()) == DRAWS

    frequent = {tokens: p * DRAWS for tokens, p in law.items() if p * DRAWS >= 10}
    counts = [observed[tokens] for tokens in frequent]
    expected = list(frequent.values())
    counts.append(DRAWS - sum(counts))
    expected.append(DRAWS - sum(expected))
    assert len(frequent) > 10
    assert chisquare(counts, expected).pvalue > 1e-3

    # The law was tested where it matters: drafts were accepted and drafts were refused.
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert 0.05 < accepted / passes < 1.9
