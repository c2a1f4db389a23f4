"""The examples, run as a user would, against `adaspec serve` with the real model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.config import load_config
from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.load.launch import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "What is the capital of France?"


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        "adaspec.toml", "stream_httpx.py", "stream_openai.py",
    }  # fmt: skip


def test_configuration_is_valid_for_the_bundled_drafter() -> None:
    config = load_config(EXAMPLES / "adaspec.toml")
    block_size = read_drafter_config(BUNDLED_DRAFTER).block_size
    assert 1 < config.verify.width(block_size) <= block_size


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """`adaspec serve --say` with the example configuration: its URL, and what it printed."""
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "adaspec.cli.main", "serve", "--port", str(port), "--say", QUESTION,
         "--config", str(EXAMPLES / "adaspec.toml"), "--log", str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed = ""
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if "Ctrl-C stops" in line:
                break
        else:
            pytest.fail(f"adaspec serve ended with {process.wait()}:\n{printed}")
        yield f"http://127.0.0.1:{port}", printed
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def run_example(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), QUESTION],
        env={**os.environ, "ADASPEC_URL": url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.server
def test_the_first_command_answers_and_keeps_serving(served: tuple[str, str]) -> None:
    _, printed = served
    assert f"> {QUESTION}\n" in printed
    assert "Paris" in printed
    assert "drafts blocks of 16 tokens, the target verifies 8" in printed


@pytest.mark.server
def test_both_clients_stream_the_same_greedy_answer(served: tuple[str, str]) -> None:
    url, printed = served
    answer = run_example("stream_openai.py", url).strip()
    text, counters = run_example("stream_httpx.py", url).rsplit("\n\n", 1)
    assert "Paris" in answer
    assert text.strip() == answer
    assert answer in printed
    found = re.fullmatch(r"(\d+) tokens in (\d+) passes of the target\n", counters)
    assert found is not None
    assert int(found[2]) <= int(found[1])
