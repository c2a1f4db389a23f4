"""What is run in the drift laboratory, and what comes of it."""

from dataclasses import dataclass

from online.shadow import Walk


@dataclass(frozen=True)
class Job:
    """One run: an arm on a scenario."""

    arm: str
    scenario: str
    seed: int


@dataclass(frozen=True)
class Run:
    """What came of a job.

    Attributes:
        phases: phase of each request.
        walks: of each request, drafted before it was learned from.
        afterwards: walks of the requests kept for forgetting, with the final weights.
        seconds: spent on learning, an ensemble's evaluation included.
        checkpoints: walks of all requests with the weights as they were at the end of each phase
            (of the default only: what is known in hindsight).
    """

    job: Job
    phases: list[str]
    walks: list[Walk]
    afterwards: list[Walk]
    seconds: float
    steps: int
    skipped: int
    checkpoints: list[list[Walk]]
