"""Traffic that changes: stages of load one after the other, each with a concurrency of its own."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, LoadRun, run_plans

_STAGE = re.compile(r"(\d+)x(\d+)(?::(.+))?")


@dataclass(frozen=True)
class Stage:
    """One stage of traffic.

    Attributes:
        concurrency: requests in flight.
        requests: in all.
        prompts: file of its prompts; None for the set that ships with AdaSpec.
    """

    concurrency: int
    requests: int
    prompts: Path | None = None

    @property
    def name(self) -> str:
        """What its prompts are called in a table."""
        return "bundled" if self.prompts is None else self.prompts.stem


def parse_stage(text: str) -> Stage:
    """A stage as it is written: ``CONCURRENCYxREQUESTS`` or ``CONCURRENCYxREQUESTS:FILE``.

    Raises:
        AdaSpecError: if it is written in another way, or a number is 0.
    """
    match = _STAGE.fullmatch(text)
    if match is None or int(match[1]) == 0 or int(match[2]) == 0:
        raise AdaSpecError(
            f"{text!r} is no stage of traffic; write requests in flight, x and requests in all, "
            "such as 8x64, and if wanted a file of prompts: 8x64:french.jsonl."
        )
    return Stage(int(match[1]), int(match[2]), Path(match[3]) if match[3] else None)


def load_stage_prompts(stages: Sequence[Stage]) -> dict[Path | None, tuple[str, ...]]:
    """The prompts of all stages, by their file.

    Raises:
        AdaSpecError: if a file cannot be read.
    """
    return {path: load_prompts(path) for path in {stage.prompts for stage in stages}}


def run_stages(
    url: str,
    stages: Sequence[Stage],
    prompts: Mapping[Path | None, Sequence[str]],
    sampling: Sampling,
    every: int | None = None,
) -> Iterator[tuple[Stage, LoadRun]]:
    """Run the stages in their order, and yield what was measured as it comes.

    Stages with the same prompts go on where the one before has ended, round and round.

    Args:
        every: requests between two measurements; None for one for each stage. The load fades out
            before each.

    Raises:
        AdaSpecError: if nothing listens at ``url``.
    """
    taken = dict.fromkeys(prompts, 0)
    for stage in stages:
        for begin in range(0, stage.requests, every or stage.requests):
            count = min(every or stage.requests, stage.requests - begin)
            plan = LoadPlan(
                concurrency=stage.concurrency, requests=count, warmup=0, sampling=sampling
            )
            source = itertools.cycle(prompts[stage.prompts])
            first = taken[stage.prompts] % len(prompts[stage.prompts])
            chosen = list(itertools.islice(source, first, first + count))
            taken[stage.prompts] += count
            (run,) = run_plans(url, chosen, [plan])
            yield stage, run
