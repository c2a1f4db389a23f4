"""`adaspec export`: take a learned drafter elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from adaspec.cli.places import only_store


def export(
    out: Annotated[Path, typer.Argument(help="Directory to make.")],
    version: Annotated[int | None, typer.Option(min=0, help="Default: the live one.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Version store; default: of `serve --online`.")
    ] = None,
) -> None:
    """Write a drafter version as a directory that stock SGLang's DFLASH loads unchanged."""
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.versions import export_version

    number = export_version(only_store(store), out, version)
    typer.echo(f"version {number} was written to {out}")
