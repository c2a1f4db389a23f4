"""The `adaspec` command: one typer application, one module for each sub-command."""

import sys
from typing import Any

import typer

from adaspec.cli import bench, control, export, keys, learn, monitor, serve, traffic, train
from adaspec.errors import AdaSpecError


class _Application(typer.Typer):
    """A typer application that prints an `AdaSpecError` as one line and exits with code 2."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except AdaSpecError as error:
            typer.secho(f"adaspec: {error}", err=True, fg=typer.colors.RED)
            sys.exit(2)


app = _Application(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding for SGLang with block-diffusion drafters that learn from traffic.",
)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("traffic")(traffic.traffic)
app.command("train")(train.train)
app.command("monitor")(monitor.monitor)
app.command("export")(export.export)
app.command("keys")(keys.keys)
app.add_typer(control.app, name="control")
app.command("learn", context_settings=learn.CONTEXT_SETTINGS)(learn.learn)


if __name__ == "__main__":
    app()
