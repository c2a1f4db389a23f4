"""Closed-loop load: a fixed number of requests, a fixed number of them in flight."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from adaspec.errors import AdaSpecError
from adaspec.load.client import RequestOutcome, Sampling, stream_chat

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
# Uvicorn closes a connection after 5 s without a request; one sent just then would be lost.
_KEPT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One level of load.

    Attributes:
        concurrency: requests in flight.
        requests: measured requests in all.
        warmup: requests sent first and left out of every figure.
    """

    concurrency: int
    requests: int
    warmup: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """The measured requests of one plan, run once.

    Attributes:
        wall_s: seconds from the first request sent to the last one finished.
        client_cpu_s: CPU seconds this process spent meanwhile; near ``wall_s``, the client is
            the bottleneck and the figures are not the server's.
        outcomes: in the order of the prompts, whatever order they finished in.
    """

    plan: LoadPlan
    repeat: int
    wall_s: float
    client_cpu_s: float
    outcomes: tuple[RequestOutcome, ...]


def run_plans(
    url: str,
    prompts: Sequence[str],
    plans: Sequence[LoadPlan],
    *,
    repeats: int = 1,
    flush_cache: bool = False,
    on_request: Callable[[LoadPlan, RequestOutcome], None] | None = None,
) -> list[LoadRun]:
    """Run every plan once per repeat, the repeats outermost, so that drift hits all plans alike.

    Args:
        url: base URL of the server.
        prompts: repeat ``r`` of a plan takes them in order, starting at ``r * requests``, round
            and round; its warm-up takes the ones just before.
        flush_cache: empty the server's prefix cache before every run.
        on_request: called after every measured request.

    Raises:
        AdaSpecError: if nothing listens at ``url``, or the cache cannot be flushed.
    """
    runs = []
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        for repeat, plan in itertools.product(range(repeats), plans):
            run = _run_plan(url, prompts, plan, repeat, flush_cache, on_request)
            runs.append(runner.run(run))
    return runs


async def _run_plan(
    url: str,
    prompts: Sequence[str],
    plan: LoadPlan,
    repeat: int,
    flush_cache: bool,
    on_request: Callable[[LoadPlan, RequestOutcome], None] | None,
) -> LoadRun:
    limits = httpx.Limits(max_connections=plan.concurrency, keepalive_expiry=_KEPT_S)
    async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False) as client:
        await _check_server(client, url, flush_cache)
        first = repeat * plan.requests

        def chosen(numbers: range) -> list[str]:
            return [prompts[number % len(prompts)] for number in numbers]

        await _closed_loop(client, url, plan, chosen(range(first - plan.warmup, first)), None)
        measured = chosen(range(first, first + plan.requests))
        wall, cpu = time.perf_counter(), time.process_time()
        outcomes = await _closed_loop(client, url, plan, measured, on_request)
        return LoadRun(
            plan=plan,
            repeat=repeat,
            wall_s=time.perf_counter() - wall,
            client_cpu_s=time.process_time() - cpu,
            outcomes=tuple(outcomes),
        )


async def _closed_loop(
    client: httpx.AsyncClient,
    url: str,
    plan: LoadPlan,
    prompts: Sequence[str],
    on_request: Callable[[LoadPlan, RequestOutcome], None] | None,
) -> list[RequestOutcome]:
    """Keep ``plan.concurrency`` requests in flight until every prompt has been answered."""
    outcomes: dict[int, RequestOutcome] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for number, prompt in waiting:
            sampling = plan.sampling.of_request(number)
            outcomes[number] = await stream_chat(client, url, prompt, sampling)
            if on_request is not None:
                on_request(plan, outcomes[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(work())
    return [outcomes[number] for number in range(len(prompts))]


async def _check_server(client: httpx.AsyncClient, url: str, flush_cache: bool) -> None:
    try:
        response = await client.get(f"{url}/health")
        if flush_cache:
            # The server refuses while it still winds up a request; it waits this long for that.
            response = await client.post(f"{url}/flush_cache", params={"timeout": 10})
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise AdaSpecError(
            f"no server answers at {url} ({type(error).__name__}); start one with `adaspec serve`."
        ) from error
    if flush_cache and response.status_code != httpx.codes.OK:
        raise AdaSpecError(
            f"the server at {url} did not flush its cache (HTTP {response.status_code}); "
            "measure while it serves nothing else."
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # SGLang brings it along; a client-only machine may lack it.
        return None
    return uvloop.new_event_loop
