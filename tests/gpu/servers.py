"""The servers of the GPU tests, by name: SmolLM2 and the bundled drafter in bfloat16.

SGLang's kernels for a GPU take no float32.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.load.launch import ServerSpec, free_port
from adaspec.target.smollm2 import ensure_smollm2
from adaspec.versions import VersionWriter
from tests.gpu.watched_server import STEPS_VARIABLE
from tests.server.online_loop import recording_spec, write_server_config

DTYPE = "bfloat16"
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
GOODPUT = '[verify]\npolicy = "goodput"\n[verify.goodput]\nprobe_seconds = 3.0\n'
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
        places: a server's files lie in a directory of its name here.
        writer: store of the drafter's versions, followed by the server ``swapped``.
        version: in that store, not live yet.
    """

    def __init__(self, places: Path, writer: VersionWriter, version: int) -> None:
        self._places = places
        self._cold = writer.path(version)
        self._launches: dict[str, Callable[[str], Launch]] = {
            "plain": lambda _: Launch(_smollm2(*SMALL, drafter=None)),
            "verify-16": lambda name: self._verifying(name, "[verify]\nlength = 16\n"),
            "verify-5": lambda name: self._verifying(name, "[verify]\nlength = 5\n"),
            "verify-1": lambda name: self._verifying(name, "[verify]\nlength = 1\n"),
            "goodput": lambda name: self._verifying(name, GOODPUT),
            "watched-graphs": lambda name: self._watched(name),
            "watched-eager": lambda name: self._watched(name, *EAGER),
            "watched-goodput": lambda name: self._watched(name, more=GOODPUT),
            "swapped": lambda name: self._recording(name, BUNDLED_DRAFTER),
            "cold": lambda name: self._recording(name, self._cold),
            "smollm2": lambda _: Launch(
                _smollm2("--max-total-tokens", "65536", *SHARED, drafter=None)
            ),
            "smollm2-online": self._full_card,
        }

    def launch(self, name: str) -> Launch:
        """The named server, its files written."""
        return self._launches[name](name)

    def _place(self, name: str) -> Path:
        directory = self._places / name
        directory.mkdir(exist_ok=True)
        return directory

    def _verifying(self, name: str, verify: str) -> Launch:
        config = self._place(name) / "adaspec.toml"
        config.write_text(verify)
        return Launch(_smollm2(*SMALL, config=config))

    def _watched(self, name: str, *extra: str, more: str = "") -> Launch:
        directory = self._place(name)
        steps = {STEPS_VARIABLE: str(directory / "steps.jsonl")}
        config = write_server_config(directory, refresh_share=0.0, more=UNWATCHED + more)
        return Launch(_smollm2(*SMALL, *extra, config=config, environment=steps), WATCHED)

    def _recording(self, name: str, drafter: Path) -> Launch:
        directory = self._place(name)
        config = write_server_config(directory, refresh_share=0.0, more=UNWATCHED)
        target = ensure_smollm2(progress=print)
        spec = recording_spec(target, drafter, directory, config, *BACKENDS, *SMALL)
        return Launch(dataclasses.replace(spec, dtype=DTYPE), RECORDING)

    def _full_card(self, name: str) -> Launch:
        config = write_server_config(self._place(name), refresh_share=0.1)
        spec = _smollm2("--enable-metrics", config=config)
        return Launch(spec, alone=True)


def _smollm2(*extra: str, drafter: Path | None = BUNDLED_DRAFTER, **changes: object) -> ServerSpec:
    return ServerSpec(
        target=str(ensure_smollm2(progress=print)),
        port=free_port(),
        drafter=None if drafter is None else str(drafter),
        dtype=DTYPE,
        extra=(*BACKENDS, *extra),
        **changes,  # type: ignore[arg-type]
    )
