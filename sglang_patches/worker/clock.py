"""How long decode steps take, from where the scheduler hands them over."""

import time
from typing import Generic, TypeVar

Step = TypeVar("Step")


class StepClock(Generic[Step]):
    """Wall time between the starts of consecutive decode steps, on the scheduler's thread.

    A step starts when the scheduler hands it to the worker, and the time until the next one starts
    is its own: passes, commit, and the scheduler's work between steps. Nothing waits for the
    device. Under overlap scheduling on a GPU the start of a step follows the end of the one before
    the last, so in a steady state the time is that of one step, on the device or the host,
    whichever is slower. On a CPU the passes run within the step, overlap or not; what overlap
    scheduling moves is only which step's results are sent out in this time.

    Steps next to a prefill or an idle batch are left out, and so are pauses without requests: they
    end with a prefill.
    """

    def __init__(self) -> None:
        self._started = self._started_before = 0.0
        self._step: Step | None = None
        self._step_before: Step | None = None

    def start(self, now: float | None = None) -> None:
        """A step of any kind starts."""
        self._started_before, self._started = (
            self._started,
            time.perf_counter() if now is None else now,
        )
        self._step_before, self._step = self._step, None

    def decode(self, step: Step) -> tuple[Step, float] | None:
        """The step is this decode step; the one before with its seconds, if that was one, too."""
        self._step = step
        if self._step_before is None:
            return None
        return self._step_before, self._started - self._started_before
