"""`adaspec learn`: become the learner process.

The learner is a package of its own, which this one does not import, and a process of its own.
"""

import os
import sys

import typer

CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def learn(context: typer.Context) -> None:
    """Learn from a running server and publish better drafters (see `adaspec learn --help`)."""
    os.execv(sys.executable, [sys.executable, "-m", "online", *context.args])
