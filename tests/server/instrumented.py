"""The stock server with an instrumented worker, for tests that must see inside the scheduler.

Launcher, processes, scheduling and kernels are those of ``python -m sglang.launch_server``; only
the worker class is replaced, in the spawned scheduler, by a subclass that the test provides.
"""

from collections.abc import Callable
from typing import Any

from adaspec.load.launch import ServerSpec
from benchmarks.stock_server import serve as launch

__all__ = ["command", "launch", "run_scheduler"]


def command(spec: ServerSpec, module: str) -> list[str]:
    """The stock command line of ``spec``, run by ``module``, whose main calls `launch`."""
    python, _, _, *arguments = spec.command()
    return [python, "-m", module, *arguments]


def run_scheduler(instrument: Callable[[type], type], *args: Any, **kwargs: Any) -> None:
    """SGLang's ``run_scheduler_process`` with ``instrument(AdaSpecWorker)`` as the worker."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_patches.worker import worker

    worker.AdaSpecWorker = instrument(worker.AdaSpecWorker)  # type: ignore[misc]
    run_scheduler_process(*args, **kwargs)
