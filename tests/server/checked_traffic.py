"""Requests in flight all the time, every answer compared with what the target itself says."""

import itertools
import threading
import time
from collections.abc import Sequence
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
        self.served = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(in_flight)]
        for thread in self._threads:
            thread.start()

    def wait(self, requests: int, seconds: float = 120.0) -> None:
        """Return once so many more requests were answered, all of them rightly."""
        wanted, deadline = self.served + requests, time.monotonic() + seconds
        while self.served < wanted:
            assert time.monotonic() < deadline, "the server does not answer any more"
            time.sleep(0.02)
        assert self.failures == []

    def close(self) -> None:
        """Stop after the requests in flight."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            prompt, expected = self._expected[next(self._numbers) % len(self._expected)]
            try:
                answer = generate(self._server, prompt, length=len(expected))["output_ids"]
                if answer != expected:
                    self.failures.append(f"{prompt} gave {answer} instead of {expected}")
            except httpx.HTTPError as error:
                self.failures.append(f"{prompt}: {error!r}")
            self.served += 1
            time.sleep(_PAUSE_S)


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
