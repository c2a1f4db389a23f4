"""Requests in flight all the time, every answer compared with what the target itself says."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from tests.server.launch import Server
from tests.server.online_loop import generate

_PAUSE_S = 0.02  # leaves the learner a share of the cores


class CheckedTraffic:
    """Greedy requests without end, in threads of their own.

    Attributes:
        served: requests answered, rightly or not.
        lost: requests without an answer.
        changed: answers that are not the target's.
        again: requests that were sent again, see `repeated`.
        failures: what was wrong, in words.

    Args:
        expected: the answer to each prompt, all of one length.
    """

    def __init__(
        self,
        server: Server,
        prompts: Sequence[list[int]],
        expected: Sequence[list[int]],
        in_flight: int = 3,
    ) -> None:
        self._server = server
        self._expected = list(zip(prompts, expected, strict=True))
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self._repeat = threading.Event()
        self._counting = threading.Lock()
        self.served = self.lost = self.changed = self.again = self._in_flight = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(in_flight)]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return self._in_flight

    def wait(self, requests: int, seconds: float = 120.0) -> None:
        """Return once so many more requests were answered, all of them rightly."""
        wanted, deadline = self.served + requests, time.monotonic() + seconds
        while self.served < wanted:
            assert time.monotonic() < deadline, "the server does not answer any more"
            time.sleep(0.02)
        assert self.failures == []

    def draw(self, draw: random.Random) -> tuple[list[int], list[int]]:
        """A prompt and its answer."""
        return draw.choice(self._expected)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No requests for the length of a ``with`` block."""
        self._go.clear()
        try:
            deadline = time.monotonic() + 120
            while self._in_flight:
                assert time.monotonic() < deadline, f"{self._in_flight} requests are not answered"
                time.sleep(0.02)
            yield
        finally:
            self._go.set()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """For the length of a ``with`` block, clients whose connection breaks ask again until they
        are answered, as those of a server that starts anew must.
        """
        self._repeat.set()
        try:
            yield
        finally:
            self._repeat.clear()

    def close(self) -> None:
        """Stop after the requests in flight."""
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._go.wait() and not self._stop.is_set():
            prompt, expected = self._expected[next(self._numbers) % len(self._expected)]
            with self._counting:
                self._in_flight += 1
            problem, lost = None, False
            try:
                answer = self._ask(prompt, len(expected))
                if answer != expected:
                    problem = f"{prompt} gave {answer} instead of {expected}"
            except httpx.HTTPError as error:
                problem, lost = f"{prompt}: {error!r}", True
            with self._counting:
                self._in_flight -= 1
                self.served += 1
                if problem is not None:
                    self.failures.append(problem)
                    self.lost += lost
                    self.changed += not lost
            time.sleep(_PAUSE_S)

    def _ask(self, prompt: list[int], length: int) -> list[int]:
        again = False
        while True:
            try:
                answer: list[int] = generate(self._server, prompt, length=length)["output_ids"]
            except httpx.TransportError:
                if not self._repeat.is_set() or self._stop.is_set():
                    raise
                with self._counting:
                    self.again += not again
                again = True
                time.sleep(0.2)
            else:
                return answer


@torch.inference_mode()
def greedy_continuations(
    target: Path, prompts: Sequence[list[int]], length: int
) -> list[list[int]]:
    """What the target says after prompts of one length, computed with transformers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    rows = torch.tensor(prompts)  # [prompts, tokens]
    start = rows.shape[1]
    for _ in range(length):
        rows = torch.cat([rows, model(rows).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return rows[:, start:].tolist()
