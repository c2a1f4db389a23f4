"""The promise, end to end: SmolLM2 with the bundled drafter says exactly what SmolLM2 says.

Float32, 64 prompts × 128 tokens, alone and eight at a time; the second round finds every prompt in
the prefix cache.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.equality import GreedyAnswer, find_partings, greedy_answers
from adaspec.load.prompts import load_prompts
from adaspec.target.smollm2 import ensure_smollm2
from tests.server.launch import Server, serve

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

# Dev prompts of GSM8K (MIT), HumanEval (MIT) and MT-bench (Apache-2.0).
DEV_PROMPTS = Path(__file__).parents[1] / "data" / "dev_prompts.jsonl"
PROMPTS = 64
TOKENS = 128


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return ensure_smollm2()


@pytest.fixture(scope="module")
def servers(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """A plain server and an ADASPEC server of the same build."""
    logs = tmp_path_factory.mktemp("lossless")
    common = ("--dtype", "float32")
    speculative = ("--speculative-algorithm", "ADASPEC", "--speculative-draft-model-path")
    config = logs / "adaspec.toml"
    config.write_text("[verify]\nlength = 8\n")  # a whole block of 16 takes twice the time on a CPU
    with ExitStack() as stack:
        plain = serve(smollm2, *common, log_path=logs / "plain.log")
        adaspec = serve(
            smollm2,
            *common,
            *speculative,
            str(BUNDLED_DRAFTER),
            log_path=logs / "adaspec.log",
            config=config,
        )
        yield stack.enter_context(plain), stack.enter_context(adaspec)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = load_prompts(DEV_PROMPTS)
    assert len(texts) == PROMPTS
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def test_greedy_output_equals_plain_decoding_token_by_token(
    servers: tuple[Server, Server], prompts: list[list[int]]
) -> None:
    plain, adaspec = servers

    def ask(server: Server, concurrency: int) -> list[GreedyAnswer]:
        return greedy_answers(server.url, prompts, max_tokens=TOKENS, concurrency=concurrency)

    with ThreadPoolExecutor(1) as pool:  # one thread of the machine's two for each server
        expected = pool.submit(ask, plain, 8)
        alone, together = ask(adaspec, 1), ask(adaspec, 8)
    assert find_partings(expected.result(), alone) == []
    assert find_partings(expected.result(), together) == []
    assert sum(answer.cached_tokens > 20 for answer in together) == PROMPTS

    generated = sum(len(answer.tokens) - 1 for answer in alone)
    passes = sum(answer.target_passes for answer in alone)
    print(f"committed tokens per target pass: {generated / passes:.2f}")
    assert generated / passes > 2.0
