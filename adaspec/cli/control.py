"""`adaspec control`: tell a running learner what to do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from adaspec.cli.places import only_channel

if TYPE_CHECKING:
    from adaspec.control import Request


class _Where(NamedTuple):
    """The learner that is meant; see `adaspec.feedback.find_channel`."""

    channel: Path | None
    address: str | None
    keys: Path | None


app = typer.Typer(
    no_args_is_help=True,
    help="Pause and resume learning, roll back, pin, or publish a drafter by hand.",
)

_Version = Annotated[int | None, typer.Argument(min=0, help="Number of the version.")]


@app.callback()
def where(
    context: typer.Context,
    channel: Annotated[
        Path | None, typer.Option(help="Directory of the sockets; default: of `serve --online`.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Instead: tcp://HOST:PORT of a learner elsewhere.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="The operator's file of `adaspec keys`.")
    ] = None,
) -> None:
    """Which learner is meant."""
    context.obj = _Where(channel, address, keys)


@app.command()
def status(context: typer.Context) -> None:
    """Say which version is live and what is held."""
    from adaspec.control import Inquire

    _ask(Inquire(), context.obj)


@app.command()
def pause(context: typer.Context) -> None:
    """Stop training and publishing; the server goes on, and its feedback is still taken in."""
    from adaspec.control import Pause

    _ask(Pause(), context.obj)


@app.command()
def resume(context: typer.Context) -> None:
    """End a pause."""
    from adaspec.control import Resume

    _ask(Resume(), context.obj)


@app.command("roll-back")
def roll_back(context: typer.Context, version: _Version = None) -> None:
    """Make an older version live; without a number, the one that the live version came from."""
    from adaspec.control import RollBack

    _ask(RollBack(version=version), context.obj)


@app.command()
def pin(context: typer.Context, version: _Version = None) -> None:
    """Make a version live, by default the live one, and publish no other until unpinned."""
    from adaspec.control import Pin

    _ask(Pin(version=version), context.obj)


@app.command()
def unpin(context: typer.Context) -> None:
    """Let the gate decide again."""
    from adaspec.control import Unpin

    _ask(Unpin(), context.obj)


@app.command()
def publish(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Drafter directory.", exists=True)],
) -> None:
    """Make the drafter in a directory the live version, without asking the gate."""
    from adaspec.control import Publish

    _ask(Publish(directory=str(directory.resolve())), context.obj)


def _ask(request: "Request", where: _Where) -> None:
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.control import ask
    from adaspec.feedback import find_channel

    directory = None if where.address is not None else str(only_channel(where.channel))
    keys = None if where.keys is None else str(where.keys)
    typer.echo(ask(find_channel(directory, where.address, keys), request))
