"""``python -m benchmarks.online.blinking_tap``: one server whose tap is open every other window.

Launcher, processes and worker are the stock ones. The tap looks away in the windows of the clock
that `is_open` excludes, and every decode step is noted with its time, so that steps with the tap
and steps without it are compared within seconds, in the same process, under the same load.
"""

import atexit
import os
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks.stock_server import serve

WINDOW_VARIABLE = "ADASPEC_BENCHMARK_TAP_WINDOW_S"
STEPS_VARIABLE = "ADASPEC_BENCHMARK_TAP_STEPS"
_FLUSH_STEPS = 200


def is_open(window: int) -> bool:
    """Whether the tap works in this window: shut, open, open, shut, so that drift cancels."""
    return window % 4 in (1, 2)


def run_blinking_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_patches.online import loop

    window_s = float(os.environ[WINDOW_VARIABLE])
    steps = array("d")  # time and requests of each step, in turn
    path = Path(os.environ[STEPS_VARIABLE])

    def flush() -> None:
        with path.open("ab") as file:
            steps.tofile(file)
        del steps[:]

    atexit.register(flush)

    class BlinkingTap(loop.FeedbackTap):
        def before_constraints(self, reqs: Any, *rest: Any) -> None:
            now = time.monotonic()
            steps.extend((now, float(len(reqs))))
            if len(steps) >= 2 * _FLUSH_STEPS:
                flush()
            if is_open(int(now / window_s)):
                super().before_constraints(reqs, *rest)

    loop.FeedbackTap = BlinkingTap  # type: ignore[misc]
    run_scheduler_process(*args, **kwargs)


if __name__ == "__main__":
    serve(run_blinking_scheduler)
