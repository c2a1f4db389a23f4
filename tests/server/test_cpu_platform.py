"""Stock SGLang on the CPU platform, over HTTP: plain serving, and DFLASH equal to it."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoTokenizer

from tests.server.conftest import CHUNK
from tests.server.launch import Server, run_until_exit, serve, sse_events
from tests.server.reference import ReferenceModel

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present"),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random prompt ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 250, (length,), generator=generator).tolist()


def greedy(server: Server, ids: list[int], length: int, **body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    sampling |= body.pop("sampling_params", {})
    answer: dict[str, Any] = server.generate(input_ids=ids, sampling_params=sampling, **body)
    return answer


@pytest.fixture(scope="module")
def reference(target: Path) -> ReferenceModel:
    return ReferenceModel(target)


@pytest.fixture(scope="module")
def eos(target: Path) -> int:
    return int(AutoTokenizer.from_pretrained(target).eos_token_id)


class TestPlainServing:
    def test_greedy_equals_transformers(
        self, plain_server: Server, reference: ReferenceModel
    ) -> None:
        for seed, length in enumerate((1, 7, 33)):
            ids = prompt(length, seed)
            assert greedy(plain_server, ids, 24)["output_ids"] == reference.greedy(ids, 24)

    def test_chunked_prefill(self, plain_server: Server, reference: ReferenceModel) -> None:
        ids = prompt(3 * CHUNK + 5, seed=10)
        plain_server.flush_cache()
        before = plain_server.log().count("Prefill batch")
        answer = greedy(plain_server, ids, 12)
        assert answer["output_ids"] == reference.greedy(ids, 12)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert plain_server.log().count("Prefill batch") - before >= 4

    def test_prefix_cache_hits_change_nothing(
        self, plain_server: Server, reference: ReferenceModel
    ) -> None:
        shared = prompt(40, seed=20)
        greedy(plain_server, shared, 4)
        ids = shared + prompt(9, seed=21)
        answer = greedy(plain_server, ids, 16)
        assert answer["meta_info"]["cached_tokens"] >= len(shared)
        assert answer["output_ids"] == reference.greedy(ids, 16)

    def test_sixteen_at_once(self, plain_server: Server, reference: ReferenceModel) -> None:
        prompts = [prompt(5 + 7 * i, seed=30 + i) for i in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda ids: greedy(plain_server, ids, 20), prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == reference.greedy(ids, 20)
        assert re.search(r"#running-req: (8|9|1\d)", plain_server.log())

    def test_streamed_chat(self, plain_server: Server) -> None:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 8,
        }
        url = f"{plain_server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60.0) as response:
            events = list(sse_events(response))
        assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert len(events) > 1

    def test_aborted_request_ends_and_frees_its_slots(self, plain_server: Server) -> None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(greedy, plain_server, prompt(8, seed=50), 1500, rid="to-abort")
            wait_for_running(plain_server)
            url = f"{plain_server.url}/abort_request"
            httpx.post(url, json={"rid": "to-abort"}, timeout=30.0).raise_for_status()
            answer = running.result(timeout=60.0)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        wait_until_idle(plain_server)

    def test_a_client_that_leaves_frees_its_slots(self, plain_server: Server) -> None:
        body = {
            "input_ids": prompt(8, seed=51),
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
            "stream": True,
        }
        url = f"{plain_server.url}/generate"
        with httpx.stream("POST", url, json=body, timeout=60.0) as response:
            next(sse_events(response))
        wait_until_idle(plain_server)

    def test_memory_is_sized_by_itself(self, plain_server: Server) -> None:
        info = plain_server.get("/server_info")
        assert info["max_total_num_tokens"] >= 8 * 1024
        assert info["internal_states"][0]["effective_max_running_requests_per_dp"] >= 8
        assert "thread(s) per forward pass" in plain_server.log()


class TestSampling:
    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    def test_narrowest_sampling_is_greedy(
        self, plain_server: Server, reference: ReferenceModel, narrow: dict[str, float]
    ) -> None:
        ids = prompt(12, seed=60)
        answer = greedy(plain_server, ids, 16, sampling_params={"temperature": 1.0, **narrow})
        assert answer["output_ids"] == reference.greedy(ids, 16)

    def test_top_k_follows_the_model(self, plain_server: Server, reference: ReferenceModel) -> None:
        check_top_k_law(plain_server, reference)

    def test_n_answers(self, plain_server: Server) -> None:
        sampling = {"temperature": 1.0, "n": 3}
        answers = greedy(plain_server, prompt(6, seed=61), 12, sampling_params=sampling)
        assert len(answers) == 3
        assert len({tuple(answer["output_ids"]) for answer in answers}) > 1

    @pytest.mark.parametrize(
        "penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"]
    )
    def test_penalties(self, plain_server: Server, reference: ReferenceModel, penalty: str) -> None:
        strength = 1.7
        ids = prompt(12, seed=62)
        # Two favoured tokens, so that the penalty decides at every step.
        favoured = reference.logits(ids).topk(2).indices.tolist()

        def adjust(logits: torch.Tensor, before: list[int], output: list[int]) -> torch.Tensor:
            # Overlap scheduling prepares a step before the last token is known: upstream counts
            # the token before it, and the prompt's last one first
            # (ScheduleBatch.cumulate_penalty_output_tokens).
            counted = [before[-1], *output[:-1]] if output else []
            counts = torch.bincount(torch.tensor(counted, dtype=torch.long), minlength=len(logits))
            if penalty == "frequency_penalty":
                logits = logits - strength * counts
            elif penalty == "presence_penalty":
                logits = logits - strength * (counts > 0)
            else:
                scaled = torch.where(logits > 0, logits / strength, logits * strength)
                logits = torch.where(counts > 0, scaled, logits)
            logits[favoured] += 20.0
            return logits

        sampling = {penalty: strength, "logit_bias": {str(token): 20.0 for token in favoured}}
        answer = greedy(plain_server, ids, 16, sampling_params=sampling)
        assert answer["output_ids"] == reference.greedy(ids, 16, adjust)

    def test_end_of_sequence_min_new_tokens_and_ignore_eos(
        self, plain_server: Server, eos: int
    ) -> None:
        ids = prompt(12, seed=63)
        eager = {"logit_bias": {str(eos): 100.0}, "ignore_eos": False}
        at_once = greedy(plain_server, ids, 20, sampling_params=eager)
        assert at_once["meta_info"]["finish_reason"]["type"] == "stop"
        assert at_once["output_ids"] == [eos]
        later = greedy(plain_server, ids, 20, sampling_params={**eager, "min_new_tokens": 6})
        assert later["output_ids"].index(eos) == len(later["output_ids"]) - 1 >= 5
        never = greedy(plain_server, ids, 20, sampling_params={**eager, "ignore_eos": True})
        assert never["output_ids"] == [eos] * 20

    def test_stop_string(self, plain_server: Server) -> None:
        letters = {str(token): 60.0 for token in byte_tokens(plain_server, "abc")}
        free = greedy(plain_server, prompt(5, seed=64), 30, sampling_params={"logit_bias": letters})
        stop = free["text"][4:6]
        stopped = greedy(
            plain_server,
            prompt(5, seed=64),
            30,
            sampling_params={"logit_bias": letters, "stop": [stop]},
        )
        assert stopped["text"] == free["text"][: free["text"].index(stop)]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}

    def test_logprobs_equal_the_models(
        self, plain_server: Server, reference: ReferenceModel
    ) -> None:
        ids = prompt(12, seed=65)
        answer = greedy(plain_server, ids, 8, return_logprob=True, top_logprobs_num=2)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        expected = reference.logprobs(ids, answer["output_ids"])
        assert logprobs == pytest.approx(expected, abs=1e-3)
        best = [entry[0][0] for entry in answer["meta_info"]["output_top_logprobs"]]
        assert best == pytest.approx(logprobs, abs=1e-3)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_regex(self, plain_server: Server, temperature: float) -> None:
        sampling = {"temperature": temperature, "regex": "[a-c]{3}-[0-9]{2}", "ignore_eos": False}
        answer = greedy(plain_server, prompt(9, seed=66), 20, sampling_params=sampling)
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", answer["text"])

    def test_json_schema(self, plain_server: Server) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
            "required": ["ok", "kind"],
            "additionalProperties": False,
        }
        # Without whitespace, which the grammar allows and a random model loves.
        bias = {str(token): -100.0 for token in byte_tokens(plain_server, " \n\t\r")}
        sampling = {"json_schema": json.dumps(schema), "ignore_eos": False, "logit_bias": bias}
        answer = greedy(plain_server, prompt(9, seed=67), 60, sampling_params=sampling)
        value = json.loads(answer["text"])
        assert isinstance(value["ok"], bool)
        assert value["kind"] in ("a", "b")


@pytest.fixture(scope="module")
def dflash_server(
    tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(tiny_drafter)),
        *("--chunked-prefill-size", str(CHUNK)),
    ]
    log_path = tmp_path_factory.mktemp("logs") / "dflash.log"
    with serve(tiny_target, *arguments, log_path=log_path) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_reference(tiny_target: Path) -> ReferenceModel:
    return ReferenceModel(tiny_target)


class TestDFlash:
    """Stock DFLASH with a random drafter: nearly nothing is accepted, and nothing may change."""

    def test_greedy_equals_the_target(
        self, dflash_server: Server, tiny_reference: ReferenceModel
    ) -> None:
        for seed, length in enumerate((1, 30, 2 * CHUNK + 9)):
            ids = prompt(length, seed=70 + seed)
            assert greedy(dflash_server, ids, 24)["output_ids"] == tiny_reference.greedy(ids, 24)

    def test_concurrency_and_prefix_hits(
        self, dflash_server: Server, tiny_reference: ReferenceModel
    ) -> None:
        shared = prompt(20, seed=80)
        prompts = [shared + prompt(3 + 5 * i, seed=81 + i) for i in range(12)]
        greedy(dflash_server, shared, 4)
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda ids: greedy(dflash_server, ids, 20), prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == tiny_reference.greedy(ids, 20)
            assert answer["meta_info"]["cached_tokens"] >= len(shared)

    def test_sampled_output_follows_the_target(
        self, dflash_server: Server, tiny_reference: ReferenceModel
    ) -> None:
        check_top_k_law(dflash_server, tiny_reference)


def test_bfloat16(target: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    with serve(target, "--dtype", "bfloat16", log_path=tmp_path / "bf16.log") as server:
        assert server.get("/server_info")["dtype"] == "bfloat16"
        ids = prompt(16, seed=90)
        output = greedy(server, ids, 24)["output_ids"]
        assert len(output) == 24
        # Rounding may choose among near-ties and nothing else.
        for i, token in enumerate(output):
            logits = reference.logits(ids + output[:i])
            assert float(logits.max() - logits[token]) < 0.05 * float(logits.max() - logits.min())


def test_refuses_to_serve_without_its_hooks(tiny_target: Path) -> None:
    code, output = run_until_exit(tiny_target, env={"SGLANG_PLUGINS": "adaspec_cpu"})
    assert code != 0
    assert "AdaSpecError: The CPU platform cannot serve" in output
    assert "assign_req_to_token_pool_func" in output


def check_top_k_law(server: Server, reference: ReferenceModel) -> None:
    """Chi-square of the first three tokens at temperature 1 and top-k 2 against the exact law."""
    ids, draws = prompt(10, seed=95), 600
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {
            (*path, token): p * q
            for path, p in law.items()
            for token, q in reference.top_k_law(ids + list(path), 2).items()
        }
    sampling = {"temperature": 1.0, "top_k": 2, "n": 60}
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws // 60):
        for answer in greedy(server, ids, 3, sampling_params=sampling):
            seen[tuple(answer["output_ids"])] += 1
    assert set(seen) <= set(law)
    # Cells too small for the test's approximation are counted together.
    large = [path for path, p in law.items() if p * draws >= 5]
    observed = [seen[path] for path in large]
    expected = [law[path] * draws for path in large]
    if draws - sum(expected) >= 5:
        observed.append(draws - sum(observed))
        expected.append(draws - sum(expected))
    assert len(expected) > 1
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-4


def byte_tokens(server: Server, text: str) -> list[int]:
    """Token ids of single characters."""
    tokens: list[int] = []
    for character in text:
        tokens += server.post("/tokenize", prompt=character, add_special_tokens=False)["tokens"]
    return tokens


def running_requests(server: Server) -> int:
    return int(server.get("/v1/loads")["loads"][0]["num_running_reqs"])


def wait_for_running(server: Server, timeout: float = 30.0) -> None:
    poll(lambda: running_requests(server) > 0, timeout)


def wait_until_idle(server: Server, timeout: float = 30.0) -> None:
    """Nothing runs, and all KV slots are free or cached: the cache can be flushed."""

    def flushed() -> bool:
        return httpx.post(f"{server.url}/flush_cache", timeout=30.0).status_code == 200

    poll(lambda: running_requests(server) == 0 and flushed(), timeout)


def poll(condition: Any, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the server did not get there in time"
        pause.wait(0.1)
