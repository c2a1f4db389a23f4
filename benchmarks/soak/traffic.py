"""Mixed traffic without end: short and long, greedy and sampled, grammar, aborts, bursts.

Greedy answers are compared with those that a server without speculation gave to the same prompts,
token by token; an answer under a grammar must obey it; every other one must be complete.
"""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = ("short", "long", "sampled", "grammar", "disconnected", "aborted")
_WEIGHTS = (5, 2, 3, 2, 1, 1)
_REGEX = r"[a-f]{8}-[0-9]{4}"
_BURST_EVERY_S, _BURST_S = 120.0, 25.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Asked:
    """A greedy request with a known answer.

    Attributes:
        prompt: text.
        tokens: most to generate.
    """

    prompt: str
    tokens: int


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        done: complete and right ones by kind; those that were broken off count once they are gone.
        lost: a sentence for each request that was not answered.
        changed: a sentence for each answer that was not the target's.
        most_in_flight: requests at one time.
    """

    done: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


async def greedy(client: httpx.AsyncClient, url: str, asked: Asked) -> list[int]:
    """The tokens of a greedy answer.

    Raises:
        httpx.HTTPError: if there is none.
    """
    sampling = {"temperature": 0, "max_new_tokens": asked.tokens}
    return list((await _generate(client, url, asked.prompt, sampling))["output_ids"])


async def reference(url: str, requests: Sequence[Asked]) -> dict[Asked, list[int]]:
    """What a server answers, one request at a time."""
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        return {asked: await greedy(client, url, asked) for asked in requests}


class Traffic:
    """Clients that send one request after the other until they are told to stop.

    Args:
        short, long: prompts by kind, with the right answers.
        steady: clients that always send; ``burst``: those that join them for bursts.
    """

    def __init__(
        self,
        url: str,
        short: Mapping[Asked, list[int]],
        long: Mapping[Asked, list[int]],
        *,
        steady: int,
        burst: int,
        seed: int,
    ) -> None:
        self._url = url
        self._right = {"short": list(short.items()), "long": list(long.items())}
        self._steady, self._burst = steady, burst
        self._random = random.Random(seed)
        self._numbers = 0
        self.tally = Tally()

    async def run(self, until: float) -> None:
        """Send until this time of the monotonic clock, then wait for what is in flight."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
            clients = [self._send(client, until, bursts=False) for _ in range(self._steady)]
            clients += [self._send(client, until, bursts=True) for _ in range(self._burst)]
            await asyncio.gather(*clients)

    async def _send(self, client: httpx.AsyncClient, until: float, bursts: bool) -> None:
        while (now := time.monotonic()) < until:
            if bursts and now % _BURST_EVERY_S > _BURST_S:
                await asyncio.sleep(0.2)
                continue
            kind = self._random.choices(KINDS, _WEIGHTS)[0]
            self._numbers += 1
            tally = self.tally
            tally.in_flight += 1
            tally.most_in_flight = max(tally.most_in_flight, tally.in_flight)
            try:
                wrong = await self._act(kind)(client, kind, f"soak-{self._numbers}")
                if wrong is None:
                    tally.done[kind] += 1
                else:
                    tally.changed.append(f"{kind}: {wrong}")
            except (httpx.HTTPError, ValueError, KeyError) as error:
                tally.lost.append(f"{kind}: {error!r}")
                await asyncio.sleep(1.0)
            finally:
                tally.in_flight -= 1

    def _act(self, kind: str) -> Callable[[httpx.AsyncClient, str, str], Awaitable[str | None]]:
        return {
            "short": self._greedy,
            "long": self._greedy,
            "sampled": self._sampled,
            "grammar": self._grammar,
            "disconnected": self._disconnected,
            "aborted": self._aborted,
        }[kind]

    async def _greedy(self, client: httpx.AsyncClient, kind: str, rid: str) -> str | None:
        asked, right = self._random.choice(self._right[kind])
        answer = await greedy(client, self._url, asked)
        return None if answer == right else f"{asked.prompt[:60]!r} gave {answer}, not {right}"

    async def _sampled(self, client: httpx.AsyncClient, kind: str, rid: str) -> str | None:
        sampling = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 48, "ignore_eos": True}
        answer = await _generate(client, self._url, self._prompt(), sampling, rid=rid)
        length = len(answer["output_ids"])
        return None if length == 48 else f"{length} tokens instead of 48"

    async def _grammar(self, client: httpx.AsyncClient, kind: str, rid: str) -> str | None:
        sampling = {"temperature": self._random.choice([0.0, 0.8]), "max_new_tokens": 40}
        sampling["regex"] = _REGEX
        text = (await _generate(client, self._url, self._prompt(), sampling, rid=rid))["text"]
        return None if re.fullmatch(_REGEX, text) else f"{text!r} is not {_REGEX}"

    async def _disconnected(self, client: httpx.AsyncClient, kind: str, rid: str) -> str | None:
        """A client that goes away in the middle of its stream."""
        body = _body(self._prompt(), {"temperature": 0, "max_new_tokens": 200}, rid=rid)
        pieces = self._random.randrange(1, 6)
        async with client.stream(
            "POST", f"{self._url}/generate", json=body | {"stream": True}
        ) as r:
            async for _ in r.aiter_lines():
                pieces -= 1
                if pieces == 0:
                    break
        return None

    async def _aborted(self, client: httpx.AsyncClient, kind: str, rid: str) -> str | None:
        """A request that is called off through the server."""
        sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
        request = asyncio.create_task(
            _generate(client, self._url, self._prompt(), sampling, rid=rid)
        )
        await asyncio.sleep(self._random.uniform(0.0, 4.0))
        await client.post(f"{self._url}/abort_request", json={"rid": rid})
        reason = (await request)["meta_info"]["finish_reason"]["type"]
        return None if reason in ("abort", "length") else f"it ended with {reason!r}"

    def _prompt(self) -> str:
        asked, _ = self._random.choice(self._right["short"])
        return asked.prompt


async def _generate(
    client: httpx.AsyncClient, url: str, prompt: str, sampling: dict[str, Any], **more: Any
) -> dict[str, Any]:
    answer = await client.post(f"{url}/generate", json=_body(prompt, sampling, **more))
    answer.raise_for_status()
    return dict(answer.json())


def _body(prompt: str, sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": sampling, **more}
