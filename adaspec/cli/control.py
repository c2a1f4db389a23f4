"""`adaspec control`: tell a running learner what to do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaspec.cli.places import only_channel

if TYPE_CHECKING:
    from adaspec.control import Request

app = typer.Typer(
    no_args_is_help=True,
    help="Pause and resume learning, roll back, pin, or publish a drafter by hand.",
)

_Channel = Annotated[
    Path | None,
    typer.Option("--channel", help="Directory of the sockets; default: of `serve --online`."),
]
_Version = Annotated[int | None, typer.Argument(min=0, help="Number of the version.")]


@app.command()
def status(channel: _Channel = None) -> None:
    """Say which version is live and what is held."""
    from adaspec.control import Inquire

    _ask(Inquire(), channel)


@app.command()
def pause(channel: _Channel = None) -> None:
    """Stop training and publishing; the server goes on, and its feedback is still taken in."""
    from adaspec.control import Pause

    _ask(Pause(), channel)


@app.command()
def resume(channel: _Channel = None) -> None:
    """End a pause."""
    from adaspec.control import Resume

    _ask(Resume(), channel)


@app.command("roll-back")
def roll_back(version: _Version = None, channel: _Channel = None) -> None:
    """Make an older version live; without a number, the one that the live version came from."""
    from adaspec.control import RollBack

    _ask(RollBack(version=version), channel)


@app.command()
def pin(version: _Version = None, channel: _Channel = None) -> None:
    """Make a version live, by default the live one, and publish no other until unpinned."""
    from adaspec.control import Pin

    _ask(Pin(version=version), channel)


@app.command()
def unpin(channel: _Channel = None) -> None:
    """Let the gate decide again."""
    from adaspec.control import Unpin

    _ask(Unpin(), channel)


@app.command()
def publish(
    directory: Annotated[Path, typer.Argument(help="Drafter directory.", exists=True)],
    channel: _Channel = None,
) -> None:
    """Make the drafter in a directory the live version, without asking the gate."""
    from adaspec.control import Publish

    _ask(Publish(directory=str(directory.resolve())), channel)


def _ask(request: "Request", channel: Path | None) -> None:
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.control import ask
    from adaspec.feedback import open_channel

    typer.echo(ask(open_channel(only_channel(channel)).control, request))
