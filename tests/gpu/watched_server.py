"""``python -m tests.gpu.watched_server``: a server that notes every host-device synchronisation
inside its decode steps.
"""

import contextlib
import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.server.instrumented import launch, run_scheduler

STEPS_VARIABLE = "ADASPEC_TEST_STEPS"


class Step(msgspec.Struct, frozen=True):
    """One decode step: the ids of its requests, a stack for each time the host waited, and the
    drafter version that was live.
    """

    requests: list[str]
    waits: list[str]
    version: int


def read_steps(path: Path) -> list[Step]:
    """The steps written so far."""
    return [msgspec.json.decode(line, type=Step) for line in path.read_bytes().splitlines()]


@contextlib.contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Stacks of the synchronising CUDA operations PyTorch sees this thread do in this block.

    It does not see ``Event.synchronize``, with which SGLang waits for results on purpose.
    """
    waits: list[str] = []
    thread = threading.get_ident()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        ours = threading.get_ident() == thread
        if ours and "synchronizing CUDA operation" in str(message):
            waits.append("".join(traceback.format_stack(limit=10)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_watched_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    run_scheduler(_watched, *args, **kwargs)


def _watched(base: type) -> type:
    class WatchedWorker(base):  # type: ignore[misc]
        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
                return super().forward_batch_generation(batch, *args, **kwargs)
            with noted_waits() as waits:
                result = super().forward_batch_generation(batch, *args, **kwargs)
            step = Step([req.rid for req in batch.reqs], waits, self.online.version)
            with Path(os.environ[STEPS_VARIABLE]).open("ab") as file:
                file.write(msgspec.json.encode(step) + b"\n")
            return result

    return WatchedWorker


if __name__ == "__main__":
    launch(run_watched_scheduler)
