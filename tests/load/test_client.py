"""One timed request: what is counted, and that every kind of failure is an outcome."""

import asyncio
import re

import httpx
import pytest

from adaspec.load.client import RequestOutcome, Sampling, chat_request, stream_chat
from adaspec.load.launch import free_port
from tests.load.fake_server import TARGET_PASSES, TOKENS, WORDS


def ask(url: str, prompt: str, **kwargs: object) -> RequestOutcome:
    async def go() -> RequestOutcome:
        async with httpx.AsyncClient() as client:
            return await stream_chat(client, url, prompt, Sampling(), **kwargs)

    return asyncio.run(go())


def test_a_complete_answer(fake_url: str) -> None:
    heard: list[str] = []
    outcome = ask(fake_url, "Why is the sky blue? Answer slowly.", on_text=heard.append)
    assert outcome.error is None
    assert outcome.text == "".join(WORDS)
    assert heard == WORDS
    assert outcome.completion_tokens == TOKENS
    assert outcome.target_passes == TARGET_PASSES
    assert outcome.first_token_s is not None
    assert outcome.started_s < outcome.first_token_s < outcome.finished_s
    expected = (outcome.finished_s - outcome.first_token_s) / (TOKENS - 1)
    assert outcome.time_per_output_token_s == pytest.approx(expected)
    assert len(outcome.gaps_s) == len(WORDS) - 1
    assert sum(outcome.gaps_s) == pytest.approx(outcome.finished_s - outcome.first_token_s)


def test_a_server_that_does_not_speculate_has_no_passes(fake_url: str) -> None:
    assert ask(fake_url, "plain").target_passes is None


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("please refuse", "HTTP 400.*refused on purpose"),
        ("please break", "broken on purpose"),
        ("please disconnect", "ended early"),
    ],
)
def test_failures_are_outcomes(fake_url: str, prompt: str, error: str) -> None:
    outcome = ask(fake_url, prompt)
    assert outcome.error is not None
    assert re.search(error, outcome.error)
    assert outcome.completion_tokens == 0


def test_no_server_is_an_outcome_too() -> None:
    outcome = ask(f"http://127.0.0.1:{free_port()}", "hello")
    assert outcome.error is not None
    assert outcome.error.startswith("ConnectError")
    assert outcome.time_to_first_token_s is None


def test_equal_work_is_asked_for_by_name_only() -> None:
    assert "ignore_eos" not in chat_request("x", Sampling())
    assert chat_request("x", Sampling(ignore_eos=True))["ignore_eos"] is True
