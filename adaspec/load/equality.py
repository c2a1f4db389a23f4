"""Is speculative output the target's own? Token-by-token comparison of two servers.

In float32 greedy outputs must be identical. In bfloat16 batches of different sizes round
differently, so two correct servers may part where the target itself is undecided: every parting
is listed with the gap between the two tokens' log-probabilities, which must be a near-tie.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from adaspec.errors import AdaSpecError

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True, kw_only=True)
class GreedyAnswer:
    """One greedy completion.

    Attributes:
        tokens: generated token ids.
        top: for every token, the target's most likely ids with their log-probabilities; empty if
            they were not asked for.
        target_passes: verification passes; 0 without speculation.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    target_passes: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where two answers to one prompt first differ.

    Attributes:
        prompt: index of the prompt; ``position``: index of the token.
        gap: log-probability of the reference's token minus that of the other server's, according to
            the reference; ``None`` if the other token is not among its most likely ones.
    """

    prompt: int
    position: int
    reference_token: int | None
    other_token: int | None
    gap: float | None


def chat_token_ids(target: Path | str, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt as one user's turn in the target's chat template, tokenised.

    Args:
        target: model directory.
    """
    from transformers import AutoTokenizer  # slow to import, and of use here only

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]


class _Meta(msgspec.Struct):
    cached_tokens: int = 0
    spec_verify_ct: int = 0
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


def greedy_answers(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
    top_logprobs: int = 0,
) -> list[GreedyAnswer]:
    """Answers of the server at ``url`` to tokenised prompts, in order.

    Raises:
        AdaSpecError: if the server refuses or fails a request.
    """
    return asyncio.run(_answers(url, prompts, max_tokens, concurrency, top_logprobs))


async def _answers(
    url: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int,
    top_logprobs: int,
) -> list[GreedyAnswer]:
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False) as client:

        async def answer(prompt: Sequence[int]) -> GreedyAnswer:
            async with gate:
                return await _answer(client, url, prompt, max_tokens, top_logprobs)

        return list(await asyncio.gather(*map(answer, prompts)))


async def _answer(
    client: httpx.AsyncClient, url: str, prompt: Sequence[int], max_tokens: int, top_logprobs: int
) -> GreedyAnswer:
    body: dict[str, object] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
    }
    if top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    response = await client.post(f"{url}/generate", json=body)
    if response.status_code != httpx.codes.OK:
        raise AdaSpecError(f"{url} answered HTTP {response.status_code}: {response.text[:300]}")
    generated = msgspec.json.decode(response.content, type=_Generated)
    meta = generated.meta_info
    return GreedyAnswer(
        tokens=tuple(generated.output_ids),
        top=tuple(
            {token: logprob for logprob, token, _ in row} for row in meta.output_top_logprobs or ()
        ),
        target_passes=meta.spec_verify_ct,
        cached_tokens=meta.cached_tokens,
    )


def find_partings(
    reference: Sequence[GreedyAnswer], other: Sequence[GreedyAnswer]
) -> list[Parting]:
    """The first difference of every pair of answers that are not identical."""
    partings = []
    for prompt, (expected, got) in enumerate(zip(reference, other, strict=True)):
        if expected.tokens == got.tokens:
            continue
        pairs = zip(expected.tokens, got.tokens, strict=False)
        shorter = min(len(expected.tokens), len(got.tokens))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        ours = expected.tokens[position] if position < len(expected.tokens) else None
        theirs = got.tokens[position] if position < len(got.tokens) else None
        top = expected.top[position] if position < len(expected.top) else {}
        gap = top[ours] - top[theirs] if ours in top and theirs in top else None
        partings.append(
            Parting(
                prompt=prompt,
                position=position,
                reference_token=ours,
                other_token=theirs,
                gap=gap,
            )
        )
    return partings
