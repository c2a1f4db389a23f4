"""Every kind of request against an ADASPEC server with a drafter that is often right.

The yardstick is the target itself in transformers, so these tests also cover the platform.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.launch import Server, serve, sse_events
from tests.server.reference import ReferenceModel
from tests.server.tiny_models import EOS

pytestmark = pytest.mark.server

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(6)]
LENGTH = 20


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fitted_drafter(tmp_path_factory.mktemp("fitted"), tiny_target, PROMPTS)


@pytest.fixture(scope="module", params=[6, 3, 1], ids=lambda length: f"verify-{length}")
def server(
    request: pytest.FixtureRequest,
    tiny_target: Path,
    drafter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("adaspec")
    config = directory / "adaspec.toml"
    config.write_text(f"[verify]\nlength = {request.param}\n")
    arguments = ("--speculative-algorithm", "ADASPEC", "--enable-custom-logit-processor")
    arguments += ("--speculative-draft-model-path", str(drafter), "--chunked-prefill-size", "64")
    with serve(
        tiny_target,
        *arguments,
        log_path=directory / "server.log",
        config=config,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> ReferenceModel:
    return ReferenceModel(tiny_target)


def generate(server: Server, prompt: list[int], **params: Any) -> dict[str, Any]:
    settings = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True, **params}
    return server.generate(input_ids=prompt, sampling_params=settings)


def test_greedy_output_is_the_targets_alone_and_together(
    server: Server, reference: ReferenceModel
) -> None:
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]
    alone = [generate(server, prompt)["output_ids"] for prompt in PROMPTS]
    assert alone == expected
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda p: generate(server, p)["output_ids"], PROMPTS))
    assert together == expected


def test_drafts_are_accepted_up_to_the_verify_length(
    server: Server, request: pytest.FixtureRequest
) -> None:
    length = request.node.callspec.params["server"]
    meta = generate(server, PROMPTS[0])["meta_info"]
    steps = LENGTH - 1  # the first token comes from the prefill
    assert meta["spec_verify_ct"] >= steps / length
    if length == 1:
        assert meta["spec_verify_ct"] == steps
    else:
        assert meta["spec_verify_ct"] < 0.8 * steps


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 0.8},
        {"presence_penalty": -0.9},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_penalties_count_every_generated_token(
    server: Server, reference: ReferenceModel, penalties: dict[str, float]
) -> None:
    def adjust(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        for token in set(output):
            logits[token] -= penalties.get("frequency_penalty", 0) * output.count(token)
            logits[token] -= penalties.get("presence_penalty", 0)
            scale = penalties.get("repetition_penalty", 1.0)
            logits[token] *= scale if logits[token] < 0 else 1 / scale
        return logits

    for prompt in PROMPTS[:3]:
        expected = reference.greedy(prompt, LENGTH, adjust)
        assert generate(server, prompt, **penalties)["output_ids"] == expected


def test_logit_bias_forbids_a_token(server: Server, reference: ReferenceModel) -> None:
    banned = reference.greedy(PROMPTS[0], 3)[2]

    def adjust(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        logits[banned] -= 1000
        return logits

    expected = reference.greedy(PROMPTS[0], LENGTH, adjust)
    assert banned not in expected
    got = generate(server, PROMPTS[0], logit_bias={str(banned): -1000.0})
    assert got["output_ids"] == expected


def test_end_of_sequence_waits_for_min_new_tokens(
    server: Server, reference: ReferenceModel
) -> None:
    def forced(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        # Make the end attractive everywhere, and forbid it for seven tokens as the server must.
        logits[EOS] += 60.0
        if len(output) < 7:
            logits[EOS] = float("-inf")
        return logits

    prompt = PROMPTS[1]
    body = {"temperature": 0, "max_new_tokens": LENGTH, "min_new_tokens": 7}
    got = server.generate(
        input_ids=prompt, sampling_params={**body, "logit_bias": {str(EOS): 60.0}}
    )
    assert got["output_ids"] == reference.greedy(prompt, 8, forced)
    assert got["output_ids"][-1] == EOS
    assert got["meta_info"]["finish_reason"]["type"] == "stop"


def test_log_probabilities_are_the_targets(server: Server, reference: ReferenceModel) -> None:
    answer = server.generate(
        input_ids=PROMPTS[2],
        return_logprob=True,
        top_logprobs_num=2,
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    )
    rows = answer["meta_info"]["output_token_logprobs"]
    assert [row[1] for row in rows] == answer["output_ids"]
    expected = reference.logprobs(PROMPTS[2], answer["output_ids"])
    assert [row[0] for row in rows] == pytest.approx(expected, abs=1e-3)
    for row in answer["meta_info"]["output_top_logprobs"]:
        assert row[0][0] >= row[1][0]


def test_stop_strings_end_the_answer_inside_a_block(
    server: Server, reference: ReferenceModel
) -> None:
    whole = generate(server, PROMPTS[3])["text"]
    # A piece that first occurs in the middle, and only printable so that it survives JSON.
    stop = next(
        whole[i : i + 2]
        for i in range(4, len(whole) - 2)
        if whole.find(whole[i : i + 2]) == i and whole[i : i + 2].isprintable()
    )
    answer = generate(server, PROMPTS[3], stop=[stop])
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["meta_info"]["finish_reason"]["matched"] == stop


def test_grammars_hold_and_are_the_targets_choice(server: Server) -> None:
    answer = generate(server, PROMPTS[0], regex="[a-f]{3}-[0-9]{4}", ignore_eos=False)
    assert re.fullmatch("[a-f]{3}-[0-9]{4}", answer["text"])
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer = generate(
        server, PROMPTS[1], json_schema=json.dumps(schema), ignore_eos=False, max_new_tokens=120
    )
    if answer["meta_info"]["finish_reason"]["type"] == "stop":
        assert set(json.loads(answer["text"])) == {"a", "b"}


def test_a_batch_of_every_kind_leaves_greedy_requests_alone(
    server: Server, reference: ReferenceModel
) -> None:
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]
    noise = [
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
        {"frequency_penalty": 1.0},
        {"regex": "[a-z]{30}"},
    ]
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(generate, server, PROMPTS[i % 6], **p) for i, p in enumerate(noise)]
        greedy = list(pool.map(lambda p: generate(server, p)["output_ids"], PROMPTS))
        for other in others:
            assert len(other.result()["output_ids"]) == LENGTH
    assert greedy == expected


def test_several_answers_to_one_prompt(server: Server) -> None:
    answers = generate(server, PROMPTS[0], n=3, temperature=1.0)
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


def test_streamed_pieces_add_up(server: Server, reference: ReferenceModel) -> None:
    body = {
        "input_ids": PROMPTS[4],
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        events = list(sse_events(response))
    assert events[-1]["output_ids"] == reference.greedy(PROMPTS[4], LENGTH)
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_prefix_hits_and_long_prompts_change_nothing(
    server: Server, reference: ReferenceModel
) -> None:
    shared = [3 + (i * 7) % 200 for i in range(150)]  # more than two prefill chunks
    for tail in ([9, 9], [9, 8], [9, 9, 4]):
        answer = generate(server, shared + tail, max_new_tokens=10)
        assert answer["output_ids"] == reference.greedy(shared + tail, 10)
    assert answer["meta_info"]["cached_tokens"] >= len(shared)


def test_hidden_states_are_refused_for_that_request_alone(server: Server) -> None:
    refused = httpx.post(
        f"{server.url}/generate",
        json={"input_ids": PROMPTS[0], "return_hidden_states": True},
        timeout=60,
    )
    assert refused.status_code == 400
    assert len(generate(server, PROMPTS[0])["output_ids"]) == LENGTH


def test_an_abandoned_stream_frees_its_place(server: Server) -> None:
    body = {
        "input_ids": PROMPTS[5],
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        next(sse_events(response))
    assert len(generate(server, PROMPTS[5])["output_ids"]) == LENGTH
