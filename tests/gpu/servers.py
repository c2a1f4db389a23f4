"""The servers of the GPU tests, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.launch import ServerSpec, free_port
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.versions import VersionWriter
from tests.gpu.watched_server import STEPS_VARIABLE
from tests.server.online_loop import recording_spec, write_server_config

BACKENDS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-prefill", "disabled"),
    # Few graphs: capturing and compiling is what a cold start spends its time on.
    *("--cuda-graph-bs-decode", "1", "2", "4", "8"),
)
SHARED = ("--mem-fraction-static", "0.3")  # of a card that other servers use, too
SMALL = (
    *SHARED,
    *("--max-running-requests", "8", "--max-total-tokens", "16384"),
    *("--chunked-prefill-size", "64"),
)
EAGER = ("--cuda-graph-backend-decode", "disabled")
UNWATCHED = "[watch]\nwindow_tokens = 0\n"  # a version stays, whatever it commits
WATCHED, RECORDING = "tests.gpu.watched_server", "tests.server.recording_server"


class Launch(NamedTuple):
    """How to start a server.

    Attributes:
        module: runs it with an instrumented worker.
        alone: it takes what memory there is, so others must have started before.
    """

    spec: ServerSpec
    module: str | None = None
    alone: bool = False


class Catalogue:
    """What servers there are.

    Args:
        target, drafter: the tiny pair.
        places: a server's files lie in a directory of its name here.
        writer: store of ``drafter``'s versions, followed by the server ``swapped``.
        version: in that store, not live yet.
    """

    def __init__(
        self, target: Path, drafter: Path, places: Path, writer: VersionWriter, version: int
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._places = places
        self._cold = writer.path(version)
        self._launches: dict[str, Callable[[str], Launch]] = {
            "plain": lambda _: Launch(self._tiny(speculative=False)),
            "verify-6": lambda name: self._verifying(name, 6),
            "verify-3": lambda name: self._verifying(name, 3),
            "verify-1": lambda name: self._verifying(name, 1),
            "watched-graphs": lambda name: self._watched(name),
            "watched-eager": lambda name: self._watched(name, *EAGER),
            "swapped": lambda name: self._recording(name, self._drafter),
            "cold": lambda name: self._recording(name, self._cold),
            "smollm2": lambda _: Launch(_smollm2("--max-total-tokens", "65536", *SHARED)),
            "smollm2-online": self._full_card,
        }

    def launch(self, name: str) -> Launch:
        """The named server, its files written."""
        return self._launches[name](name)

    def _tiny(self, *extra: str, speculative: bool = True, **changes: object) -> ServerSpec:
        return ServerSpec(
            target=str(self._target),
            port=free_port(),
            drafter=str(self._drafter) if speculative else None,
            dtype="float32",
            extra=(*BACKENDS, *SMALL, *extra),
            **changes,  # type: ignore[arg-type]
        )

    def _place(self, name: str) -> Path:
        directory = self._places / name
        directory.mkdir(exist_ok=True)
        return directory

    def _verifying(self, name: str, length: int) -> Launch:
        config = self._place(name) / "adaspec.toml"
        config.write_text(f"[verify]\nlength = {length}\n")
        return Launch(self._tiny(config=config))

    def _watched(self, name: str, *extra: str) -> Launch:
        directory = self._place(name)
        steps = {STEPS_VARIABLE: str(directory / "steps.jsonl")}
        config = write_server_config(directory, refresh_share=0.0, more=UNWATCHED)
        return Launch(self._tiny(*extra, config=config, environment=steps), WATCHED)

    def _recording(self, name: str, drafter: Path) -> Launch:
        directory = self._place(name)
        config = write_server_config(directory, refresh_share=0.0, more=UNWATCHED)
        spec = recording_spec(self._target, drafter, directory, config, *BACKENDS, *SMALL)
        return Launch(spec, RECORDING)

    def _full_card(self, name: str) -> Launch:
        config = write_server_config(self._place(name), refresh_share=0.1)
        spec = _smollm2("--enable-metrics", drafter=str(BUNDLED_DRAFTER), config=config)
        return Launch(spec, alone=True)


def _smollm2(*extra: str, **changes: object) -> ServerSpec:
    return ServerSpec(
        target=str(ensure_smollm2(progress=print)),
        port=free_port(),
        dtype="bfloat16",
        extra=(*BACKENDS, *extra),
        **changes,  # type: ignore[arg-type]
    )
