"""`adaspec serve`: a stock SGLang server with a drafter, started with the arguments filled in."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from adaspec.cli.learner_keeper import LearnerKeeper, Patience
from adaspec.cli.serve_plan import ServeOptions, ServePlan, plan_server
from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling, stream_chat
from adaspec.load.launch import ServerProcess, check_port_is_free, start_server
from adaspec.target.smollm2 import cache_directory

_SAY = Sampling(max_tokens=256)


def serve(
    sglang_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SGLANG_OPTIONS]", help="Handed to SGLang unchanged."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Model directory; default: SmolLM2-135M-Instruct.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter directory; default: the bundled one of SmolLM2.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Serve without speculation.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Learn from the traffic while serving.")
    ] = False,
    learn_config: Annotated[
        Path | None, typer.Option(help="The learner's configuration (TOML); with --online.")
    ] = None,
    learner_silence: Annotated[
        float,
        typer.Option(min=1, help="Seconds of silence after which a learner is started again."),
    ] = Patience.silence,
    config: Annotated[Path | None, typer.Option(help="AdaSpec configuration (TOML).")] = None,
    dtype: Annotated[str | None, typer.Option(help="SGLang's --dtype.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    say: Annotated[
        str | None, typer.Option(help="Ask this once the server is up, then keep serving.")
    ] = None,
    log: Annotated[
        str | None, typer.Option(help='File for the server\'s log, or "-" for the terminal.')
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds the server may take to start.")
    ] = 1800.0,
) -> None:
    """Serve a model with its drafter until Ctrl-C; without options, SmolLM2 on this machine.

    Exits with the server's own code, or 0 after Ctrl-C or SIGTERM.
    """
    console = Console(highlight=False, soft_wrap=True)
    check_port_is_free(host, port)
    options = ServeOptions(
        target=target,
        drafter=drafter,
        plain=plain,
        online=online,
        learn_config=learn_config,
        config=config,
        dtype=dtype,
        host=host,
        port=port,
        extra=tuple(sglang_options or ()),
    )
    plan = _plan(console, options)
    log_file = _log_file(log, port)
    for sentence in (*plan.sentences, f"Log: {log_file or 'this terminal'}"):
        console.print(escape(sentence))
    with contextlib.ExitStack() as stack:
        keeper = None
        if plan.learner is not None:
            learner_log = log_file and log_file.with_suffix(".learner.log")
            console.print(escape(f"Learner's log: {learner_log or 'this terminal'}"))
            keeper = LearnerKeeper(
                plan.learner.command,
                plan.learner.status,
                learner_log,
                lambda sentence: console.print(escape(sentence)),
                Patience(silence=learner_silence),
            )
            stack.enter_context(keeper)
        raise typer.Exit(_run(console, plan, log_file, say, start_timeout, keeper))


def _plan(console: Console, options: ServeOptions) -> ServePlan:
    with console.status("Looking for the model") as status:

        def progress(message: str) -> None:
            # The line stays, for terminals and logs that show no spinner.
            console.print(escape(message))
            status.update(escape(message))

        return plan_server(options, progress)


def _log_file(log: str | None, port: int) -> Path | None:
    """The file to log to; ``None`` for the terminal."""
    if log == "-":
        return None
    file = Path(log) if log is not None else cache_directory() / "logs" / f"serve-{port}.log"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise AdaSpecError(
            f"cannot write the log {file} ({error.strerror}); choose another file with --log."
        ) from error
    return file


def _run(
    console: Console,
    plan: ServePlan,
    log: Path | None,
    say: str | None,
    start_timeout_s: float,
    keeper: LearnerKeeper | None,
) -> int:
    """Start the server, talk to it once if asked, and stay until it ends; returns the exit code."""
    started = time.monotonic()
    # In the terminal's process group, so that whoever kills the group leaves no server behind.
    with (
        start_server(plan.spec, log=log, own_group=False) as server,
        _stop_on_signal(server, keeper) as stop,
    ):
        try:
            with console.status("Starting SGLang") as status:
                server.wait_until_healthy(
                    start_timeout_s,
                    on_wait=lambda line: status.update(escape(f"Starting SGLang  {line}"[:110])),
                )
            console.print(f"Ready after {time.monotonic() - started:.0f} s on {server.url}")
            if say is not None:
                _answer(console, server.url, say)
            console.print(escape(_how_to_call(server.url)))
        except AdaSpecError:
            if not stop.requested:
                raise
        code = server.process.wait()
    # A child ended by signal N reports -N; a shell expects 128 + N.
    return 0 if stop.requested else code if code >= 0 else 128 - code


def _answer(console: Console, url: str, prompt: str) -> None:
    """Stream the answer to one prompt to the terminal, and say how it went.

    Raises:
        AdaSpecError: if the answer did not come to its end.
    """
    console.print(f"\n[bold]> {escape(prompt)}[/bold]")

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
            outcome = await stream_chat(
                client, url, prompt, _SAY, on_text=lambda text: console.out(text, end="")
            )
        console.print()
        if outcome.error is not None:
            raise AdaSpecError(f"the server did not complete its answer: {outcome.error}.")
        seconds = outcome.finished_s - outcome.started_s
        words = f"{outcome.completion_tokens} tokens in {seconds:.1f} s"
        if outcome.target_passes:
            rate = outcome.completion_tokens / outcome.target_passes
            words += f", {rate:.2f} committed tokens per pass of the target"
        console.print(f"[dim]({words})[/dim]\n")

    asyncio.run(ask())


def _how_to_call(url: str) -> str:
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return (
        f"OpenAI clients: base_url={url}/v1, any api_key. With curl:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        "Ctrl-C stops the server."
    )


class _Stop:
    """Turns the first SIGINT or SIGTERM into a request to drain; the second kills the server."""

    def __init__(self, server: ServerProcess, keeper: LearnerKeeper | None) -> None:
        self.requested = False
        self._server = server
        self._keeper = keeper

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        # SIGTERM in either case: a terminal has sent its Ctrl-C to the whole group already, and
        # SGLang answers requests in flight before it obeys a SIGTERM.
        if self.requested:
            self._server.process.kill()
        else:
            self.requested = True
            self._server.process.terminate()
            if self._keeper is not None:
                self._keeper.ask_to_stop()


@contextlib.contextmanager
def _stop_on_signal(server: ServerProcess, keeper: LearnerKeeper | None) -> Iterator[_Stop]:
    stop = _Stop(server, keeper)
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
