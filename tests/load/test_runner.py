"""The closed loop: how many in flight, which prompts, what is left out."""

from collections import Counter

import httpx
import pytest

from adaspec.errors import AdaSpecError
from adaspec.load import runner
from adaspec.load.client import RequestOutcome, Sampling
from adaspec.load.launch import free_port
from adaspec.load.runner import LoadPlan, run_plans


def plan(concurrency: int = 1, requests: int = 1, warmup: int = 0) -> LoadPlan:
    return LoadPlan(concurrency=concurrency, requests=requests, warmup=warmup, sampling=Sampling())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """Record prompts and the number in flight instead of asking a model."""
    seen: dict[str, list] = {"prompts": [], "in_flight": []}
    flying = 0

    async def stream_chat(
        client: httpx.AsyncClient, url: str, prompt: str, sampling: Sampling
    ) -> RequestOutcome:
        nonlocal flying
        flying += 1
        seen["prompts"].append(prompt)
        seen["in_flight"].append(flying)
        # Later prompts finish sooner, so that order of completion differs from order of prompts.
        await client.get(f"{url}/health", timeout=5)
        flying -= 1
        return RequestOutcome(started_s=0.0, first_token_s=None, finished_s=0.0, text=prompt)

    monkeypatch.setattr(runner, "stream_chat", stream_chat)
    return seen


def test_keeps_exactly_so_many_in_flight(fake_url: str, sent: dict[str, list]) -> None:
    (run,) = run_plans(fake_url, [str(n) for n in range(12)], [plan(concurrency=4, requests=12)])
    assert max(sent["in_flight"]) == 4
    assert [outcome.text for outcome in run.outcomes] == [str(n) for n in range(12)]


def test_warm_up_is_sent_but_not_counted(fake_url: str, sent: dict[str, list]) -> None:
    (run,) = run_plans(fake_url, ["a", "b", "c", "d"], [plan(requests=2, warmup=1)])
    assert sent["prompts"] == ["d", "a", "b"]
    assert [outcome.text for outcome in run.outcomes] == ["a", "b"]


def test_repeats_are_outermost_and_take_new_prompts(fake_url: str, sent: dict[str, list]) -> None:
    plans = [plan(requests=2), plan(concurrency=2, requests=2)]
    runs = run_plans(fake_url, ["a", "b", "c"], plans, repeats=2)
    assert [(run.repeat, run.plan.concurrency) for run in runs] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [[o.text for o in run.outcomes] for run in runs[::2]] == [["a", "b"], ["c", "a"]]


def test_reports_every_measured_request(fake_url: str) -> None:
    seen: Counter[int] = Counter()
    run_plans(
        fake_url,
        ["hello"],
        [plan(requests=3, warmup=2)],
        on_request=lambda p, outcome: seen.update([p.concurrency]),
    )
    assert seen == {1: 3}


def test_failures_do_not_stop_a_run(fake_url: str) -> None:
    prompts = ["hello", "refuse", "disconnect", "hello"]
    (run,) = run_plans(fake_url, prompts, [plan(concurrency=2, requests=4)])
    assert [outcome.error is None for outcome in run.outcomes] == [True, False, False, True]


def test_the_cache_is_flushed_before_every_run(fake_url: str) -> None:
    before = httpx.get(f"{fake_url}/flushes").json()
    run_plans(fake_url, ["hello"], [plan(), plan()], repeats=2, flush_cache=True)
    assert httpx.get(f"{fake_url}/flushes").json() == before + 4


@pytest.mark.parametrize("url", [f"http://127.0.0.1:{free_port()}", "http://[bad", "nonsense"])
def test_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(AdaSpecError, match=r"no server answers at .*adaspec serve"):
        run_plans(url, ["hello"], [plan()])
