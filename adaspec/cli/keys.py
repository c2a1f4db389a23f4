"""`adaspec keys`: make the keys of a learner, its servers and its operators."""

from pathlib import Path
from typing import Annotated

import typer

_USES = {
    "learner": "adaspec learn --keys",
    "server": "channel.keys in the servers' configuration",
    "operator": "adaspec control --keys",
}


def keys(directory: Annotated[Path, typer.Argument(help="Where to write them.")]) -> None:
    """Make keys for a learner and servers that meet over a network or share a store with strangers.

    Each file is a secret. Move it to the machine that needs it, by a way that nobody listens to.
    """
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.feedback.keys import make_keys

    for role, path in make_keys(directory).items():
        typer.echo(f"{path}: for {_USES[role]}")
