"""``python -m tests.server.watched_swaps``: a server that notes what each swap
came amid.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from tests.server.instrumented import launch

NOTES_VARIABLE = "ADASPEC_TEST_SWAPS"


class SwapNote(msgspec.Struct, frozen=True):
    """The scheduler when a version went live.

    Attributes:
        version: that went live.
        chunked: whether a prompt was between two of its chunks.
        retracted: requests that had lost their KV slots and waited to start again.
        running: requests that were being answered.
        evicted: tokens that the prefix cache had given up since the server's start.
    """

    version: int
    chunked: bool
    retracted: int
    running: int
    evicted: int


def read_notes(path: Path) -> dict[int, SwapNote]:
    """The swaps so far, by version."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    notes = [msgspec.json.decode(line, type=SwapNote) for line in lines]
    return {note.version: note for note in notes}


def run_watched_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_patches.online.swap import VersionSwapper

    made: list[Any] = []
    evicted = 0
    evict, between_steps = RadixCache.evict, VersionSwapper.between_steps

    class Kept(scheduler.Scheduler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    def counted(cache: Any, *args: Any) -> Any:
        nonlocal evicted
        result = evict(cache, *args)
        evicted += result.num_tokens_evicted
        return result

    def noted(swapper: VersionSwapper) -> Any:
        swap = between_steps(swapper)
        if swap is not None:
            (it,) = made
            waiting = sum(req.retraction_count > 0 for req in it.waiting_queue)
            running = len(it.running_batch.reqs)
            note = SwapNote(swap.version, it.chunked_req is not None, waiting, running, evicted)
            with Path(os.environ[NOTES_VARIABLE]).open("ab") as file:
                file.write(msgspec.json.encode(note) + b"\n")
        return swap

    scheduler.Scheduler, RadixCache.evict = Kept, counted  # type: ignore[misc,method-assign]
    VersionSwapper.between_steps = noted  # type: ignore[method-assign]
    scheduler.run_scheduler_process(*args, **kwargs)


if __name__ == "__main__":
    launch(run_watched_scheduler)
