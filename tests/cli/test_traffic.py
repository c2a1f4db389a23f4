"""`adaspec traffic` against a stand-in server."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.errors import AdaSpecError
from adaspec.load.client import Sampling
from adaspec.load.launch import free_port
from adaspec.load.runner import LoadPlan, LoadRun
from adaspec.load.stages import Stage, load_stage_prompts, parse_stage, run_stages
from tests.cli.test_bench import prompts_file
from tests.load.fake_server import TARGET_PASSES, TOKENS


def test_a_stage_is_read_as_it_is_written() -> None:
    assert parse_stage("8x64") == Stage(8, 64)
    assert parse_stage("1x2:a:b.jsonl") == Stage(1, 2, Path("a:b.jsonl"))


@pytest.mark.parametrize("text", ["", "8", "x8", "0x4", "4x0", "4x-1", "4x8:", "4 x 8", "4x8;a"])
def test_what_is_no_stage_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AdaSpecError, match="such as 8x64"):
        parse_stage(text)


def test_stages_run_in_order_and_prompts_go_on_round_and_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, str]] = []

    def note(_: str, prompts: list[str], plans: list[LoadPlan]) -> list[LoadRun]:
        sent.append((plans[0].concurrency, "".join(prompts)))
        return [LoadRun(plan=plans[0], repeat=0, wall_s=1.0, client_cpu_s=0.0, outcomes=())]

    monkeypatch.setattr("adaspec.load.stages.run_plans", note)
    file, other = Path(prompts_file(tmp_path, "a", "b", "c")), tmp_path / "other.jsonl"
    other.write_text('{"prompt": "d"}\n')
    stages = [Stage(1, 2, file), Stage(2, 4, other), Stage(3, 5, file)]
    found = run_stages("u", stages, load_stage_prompts(stages), Sampling(), every=3)
    assert [stage for stage, _ in found] == [stages[0], *[stages[1]] * 2, *[stages[2]] * 2]
    assert sent == [(1, "ab"), (2, "ddd"), (2, "d"), (3, "cab"), (3, "ca")]


def test_a_line_for_each_stage_and_every_figure_in_a_file(fake_url: str, tmp_path: Path) -> None:
    out, file = tmp_path / "out.json", prompts_file(tmp_path, "hello")
    done = CliRunner().invoke(
        app, ["traffic", f"{fake_url}/", "1x2", f"2x3:{file}", "1x1", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["bundled", "1", "2"], ["prompts", "2", "3"], ["bundled", "1", "1"]
    ]  # fmt: skip
    assert all(float(row[-1]) == pytest.approx(TOKENS / TARGET_PASSES, abs=0.01) for row in rows)
    document = json.loads(out.read_text())
    assert document["stages"] == ["1x2", f"2x3:{file}", "1x1"]
    assert [run["output_tokens"] for run in document["runs"]] == [2 * TOKENS, 3 * TOKENS, TOKENS]


def test_a_failed_request_fails_the_command(fake_url: str, tmp_path: Path) -> None:
    file = prompts_file(tmp_path, "hello", "refuse")
    done = CliRunner().invoke(app, ["traffic", fake_url, f"1x2:{file}"])
    assert done.exit_code == 1
    assert "refused on purpose" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1x1:nowhere.jsonl"], "cannot read the prompts"),
        (["1x1", "--json", "/nowhere/out.json"], "choose another file with --json"),
        (["1x1"], "no server answers"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["traffic", f"http://127.0.0.1:{free_port()}", *words])
    assert isinstance(done.exception, AdaSpecError)
    assert says in str(done.exception)
