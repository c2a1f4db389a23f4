"""The stock server with an instrumented worker, for tests that must see inside the scheduler.

Launcher, processes, scheduling and kernels are those of ``python -m sglang.launch_server``; only
the worker class is replaced, in the spawned scheduler, by a subclass that the test provides.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from adaspec.load.launch import ServerSpec


def command(spec: ServerSpec, module: str) -> list[str]:
    """The stock command line of ``spec``, run by ``module``, whose main calls `launch`."""
    python, _, _, *arguments = spec.command()
    return [python, "-m", module, *arguments]


def launch(run_scheduler_process: Callable[..., None]) -> None:
    """Do what ``sglang.launch_server`` does, with another function as the scheduler process."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    server_args.resolve_once()
    try:
        launch_server(server_args, run_scheduler_process_func=run_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def run_scheduler(instrument: Callable[[type], type], *args: Any, **kwargs: Any) -> None:
    """SGLang's ``run_scheduler_process`` with ``instrument(AdaSpecWorker)`` as the worker."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_patches.worker import worker

    worker.AdaSpecWorker = instrument(worker.AdaSpecWorker)  # type: ignore[misc]
    run_scheduler_process(*args, **kwargs)
