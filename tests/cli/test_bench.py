"""`adaspec bench` against a stand-in server."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.errors import AdaSpecError
from adaspec.load.launch import free_port
from tests.load.fake_server import TARGET_PASSES, TOKENS


def prompts_file(tmp_path: Path, *prompts: str) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(file)


def test_writes_every_run_with_the_facts_to_repeat_it(fake_url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app,
        ["bench", f"{fake_url}/", "-c", "2", "-c", "1", "--requests", "3", "--repeats", "2",
         "--warmup", "1", "--max-tokens", "7", "--json", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["url"] == fake_url
    assert document["sampling"] == {
        "max_tokens": 7, "temperature": 0.0, "ignore_eos": False, "spread": 0.0,
    }  # fmt: skip
    assert {"cpu", "cores", "command", "packages"} <= document["machine"].keys()
    runs = [(run["repeat"], run["concurrency"]) for run in document["runs"]]
    assert runs == [(0, 2), (0, 1), (1, 2), (1, 1)]
    for run in document["runs"]:
        assert run["output_tokens"] == 3 * TOKENS
        assert run["committed_per_pass"] == TOKENS / TARGET_PASSES


def test_failed_requests_are_counted_named_and_fail_the_command(
    fake_url: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        app,
        ["bench", fake_url, "-c", "1", "--requests", "2", "--repeats", "1", "--warmup", "0",
         "--prompts", prompts_file(tmp_path, "hello", "refuse")],
    )  # fmt: skip
    assert done.exit_code == 1
    assert "refused on purpose" in done.output


def test_no_server_is_one_sentence() -> None:
    done = CliRunner().invoke(app, ["bench", f"http://127.0.0.1:{free_port()}"])
    assert isinstance(done.exception, AdaSpecError)
    assert "no server answers" in str(done.exception)


def test_an_unwritable_result_is_refused_before_the_load(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "http://unused", "--json", str(tmp_path / "no" / "x")])
    assert isinstance(done.exception, AdaSpecError)
    assert "--json" in str(done.exception)


@pytest.mark.parametrize("value", ["0", "-3"])
def test_impossible_concurrency_is_refused(value: str) -> None:
    assert CliRunner().invoke(app, ["bench", "http://unused", "-c", value]).exit_code == 2
