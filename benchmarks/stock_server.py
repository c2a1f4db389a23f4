"""``sglang.launch_server`` with a scheduler process of a benchmark's own."""

import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run_scheduler_process: Callable[..., Any]) -> None:
    """What ``python -m sglang.launch_server`` does with this process's command line.

    Args:
        run_scheduler_process: a module's function, since it is started in another process; it
            replaces upstream's `run_scheduler_process` and ends by calling it.
    """
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
