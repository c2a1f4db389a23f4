"""``python -m online``: the learner process, which `adaspec learn` becomes."""

import sys

import typer

from adaspec.errors import AdaSpecError
from online.command import learn


def main() -> None:
    """Run the command; a problem the user can act on is one line and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(learn)
    try:
        app(prog_name="adaspec learn")
    except AdaSpecError as error:
        typer.secho(f"adaspec: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)


if __name__ == "__main__":
    main()
