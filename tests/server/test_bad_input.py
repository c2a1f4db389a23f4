"""A server that cannot serve ends at start, with exit code 1 and one sentence that names the cause.

What is refused is tested case by case in `tests.sglang_patches.test_checks`; here the real command
shows that the refusals come before SGLang's own errors, and how they look.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server
from tests.server.tiny_models import write_drafter

pytestmark = pytest.mark.server

# Another release of SGLang, as far as AdaSpec can see.
OTHER_SGLANG = """
import runpy, sglang.version
sglang.version.__version__ = "0.5.99"
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


class Start(NamedTuple):
    drafter: Path | None
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    script: str | None = None


def missing_directory(directory: Path) -> Start:
    return Start(directory / "nowhere")


def no_drafter(directory: Path) -> Start:
    return Start(None, ("--speculative-algorithm", "ADASPEC"))


def truncated_weights(directory: Path) -> Start:
    drafter = write_drafter(directory / "truncated")
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return Start(drafter)


def unknown_option(directory: Path) -> Start:
    config = directory / "adaspec.toml"
    config.write_text("[verify]\nlenght = 3\n")
    return Start(write_drafter(directory / "drafter"), config=config)


def unsupported_flag(directory: Path) -> Start:
    return Start(write_drafter(directory / "drafter"), ("--pp-size", "2"))


def another_sglang(directory: Path) -> Start:
    return Start(write_drafter(directory / "drafter"), script=OTHER_SGLANG)


CASES: dict[Callable[[Path], Start], str] = {
    missing_directory: "nowhere does not exist",
    no_drafter: "--speculative-draft-model-path",
    truncated_weights: "model.safetensors is truncated",
    unknown_option: "lenght",
    unsupported_flag: "--pp-size",
    another_sglang: "but 0.5.99 is installed",
}


@pytest.fixture(scope="module")
def outcomes(
    tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """(exit code, output) of every case; two at a time, since each imports all of SGLang."""

    def outcome(case: Callable[[Path], Start]) -> tuple[int, str]:
        directory = tmp_path_factory.mktemp(case.__name__)
        start = case(directory)
        spec = ServerSpec(
            target=str(tiny_target),
            port=free_port(),
            drafter=None if start.drafter is None else str(start.drafter),
            config=start.config,
            extra=start.arguments,
        )
        command = spec.command()
        if start.script is not None:
            command = [sys.executable, "-c", start.script, *command[3:]]
        log = directory / "server.log"
        with start_server(spec, log=log, command=command) as server:
            code = server.process.wait(150)
        return code, log.read_text(errors="replace")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip([case.__name__ for case in CASES], pool.map(outcome, CASES), strict=True))


@pytest.mark.parametrize("case", list(CASES), ids=lambda case: case.__name__)
def test_refused_in_one_sentence(
    case: Callable[[Path], Start], outcomes: dict[str, tuple[int, str]]
) -> None:
    code, output = outcomes[case.__name__]
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("adaspec.errors.AdaSpecError: ")
    assert CASES[case] in last
    assert output.count("AdaSpecError") == 1
    assert "Traceback" not in output
    assert "Load weight" not in output
