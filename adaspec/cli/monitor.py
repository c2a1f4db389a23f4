"""`adaspec monitor`: watch a server that runs ADASPEC."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.live import Live

from adaspec.cli.files import check_writable
from adaspec.cli.places import only_store
from adaspec.errors import AdaSpecError
from adaspec.hosts import is_loopback
from adaspec.monitor import Monitor, Report, draw, look, read_log, render

_TIMEOUT_S = 10.0


def monitor(
    url: Annotated[str, typer.Argument(help="Base URL of the server.")] = "http://127.0.0.1:30000",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between readings.")] = 2.0,
    window: Annotated[float, typer.Option(min=1.0, help="Seconds that figures are over.")] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="Two readings, one report.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON per report.")] = False,
    log: Annotated[Path | None, typer.Option(help="Append each report as a line of JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what --log has written, and end.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Version store, for the reasons of decisions.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page with plots instead.")] = False,
    host: Annotated[str, typer.Option(help="Address of the page.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0: any.")] = 30090,
) -> None:
    """Show whether the drafter gets better and whether speculation pays.

    Reads the server's /metrics, so the server needs --enable-metrics. Goes on when the server is
    away or starts again, and says so. With --once, exits with code 1 if the server does not answer.
    """
    if plot is not None:
        if log is None:
            raise AdaSpecError("--plot draws a log: name it with --log.")
        draw(read_log(log), plot)
        return
    if log is not None:
        check_writable(log, "--log")
    watched = Monitor(url.rstrip("/"), window, store or _store_of(url))
    if web:
        _serve_page(watched, url, interval, log, host, port)
        return
    # Ctrl-C is how one leaves.
    with contextlib.suppress(KeyboardInterrupt), httpx.Client(timeout=_TIMEOUT_S) as client:
        if once:
            first = look(watched, client, url)
            if first.problem is None:
                time.sleep(interval)
            report = first if first.problem is not None else look(watched, client, url)
            _show(report, json, log)
            raise typer.Exit(0 if report.problem is None else 1)
        if json:
            while True:
                _show(look(watched, client, url), json, log)
                time.sleep(interval)
        with Live(console=Console(), refresh_per_second=4, screen=sys.stdout.isatty()) as live:
            while True:
                report = look(watched, client, url)
                _append(report, log)
                live.update(render(report))
                time.sleep(interval)


def _store_of(url: str) -> Path | None:
    """The version store of a server on this machine, if there is exactly one."""
    if not is_loopback(httpx.URL(url).host):
        return None
    with contextlib.suppress(AdaSpecError):
        return only_store(None)
    return None


def _serve_page(
    watched: Monitor, url: str, interval: float, log: Path | None, host: str, port: int
) -> None:
    # Starlette and uvicorn take a while to import.
    from adaspec.monitor.web import Watcher, listen, serve

    with listen(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        print(f"http://{address}:{listener.getsockname()[1]}/", flush=True)
        if not is_loopback(host):
            print("Whoever reaches this address can read the figures.", file=sys.stderr)
        keep = Watcher(watched, url.rstrip("/"), interval, lambda report: _append(report, log))
        serve(keep, listener, host)


def _show(report: Report, json: bool, log: Path | None) -> None:
    _append(report, log)
    if json:
        print(msgspec.json.encode(report).decode(), flush=True)
    else:
        Console().print(render(report))


def _append(report: Report, log: Path | None) -> None:
    if log is not None:
        with log.open("ab") as file:
            file.write(msgspec.json.encode(report) + b"\n")
