"""`adaspec train` from the command line: a whole run, its continuation, its refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from adaspec.cli.main import app
from adaspec.drafters.checkpoint import check_drafter_for_target
from adaspec.errors import AdaSpecError
from adaspec.training.run import run_training
from tests.training.settings import config

TOML = """
log_every = 1
evaluate_every = 2
checkpoint_every = 2
{extra}
[drafter]
block_size = 4
num_layers = 1
target_layer_ids = [0, 1]
mask_token_id = 2
[generate]
max_new_tokens = 12
[optim]
max_steps = 5
[data]
tokens_per_batch = 128
blocks_per_batch = 16
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(6)))
    return path


def run(target: Path, prompts: Path, out: Path, extra: str = "") -> Result:
    settings = out.with_suffix(".toml")
    settings.write_text(TOML.format(extra=extra))
    arguments = ["--target", target, "--prompts", prompts, "--out", out, "--config", settings]
    return CliRunner().invoke(app, ["train", *map(str, arguments), "--device", "cpu"])


def test_a_run_leaves_a_drafter_that_fits_the_target(
    target_directory: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run(target_directory, prompts, out)
    assert result.exit_code == 0, result.output
    assert "committed tokens per target pass" in result.stdout
    config = check_drafter_for_target(out / "drafter", target_directory)
    assert (config.block_size, config.target_layer_ids) == (4, (0, 1))
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert [s["step"] for s in steps if s["kind"] == "heldout"] == [2, 4, 5]

    before = load_file(out / "drafter" / "model.safetensors")
    assert run(target_directory, prompts, out).exit_code == 0  # finished: nothing is trained again
    after = load_file(out / "drafter" / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)

    other = run(target_directory, prompts, out, extra="seed = 1")
    assert isinstance(other.exception, AdaSpecError)
    assert "choose another output directory" in str(other.exception)


def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    target_directory: Path, prompts: Path, tmp_path: Path
) -> None:
    settings = config(optim={"max_steps": 7})

    def train(out: Path, stop_at: str | None = None) -> bytes:
        def interrupt(stage: str, share: float, text: str) -> None:
            if stop_at is not None and text.startswith(stop_at):
                raise KeyboardInterrupt

        run_training(target_directory, [prompts], out, settings, torch.device("cpu"), interrupt)
        return (out / "drafter" / "model.safetensors").read_bytes()

    for stop_at in ("step 2 ", "step 5 "):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "parts", stop_at)
        assert not (tmp_path / "parts" / "drafter").exists()
    assert train(tmp_path / "parts") == train(tmp_path / "whole")


def test_a_drafter_that_cannot_be_made_is_refused_before_trajectories_are(
    target_directory: Path, prompts: Path, tmp_path: Path
) -> None:
    settings = config(drafter={"mask_token_id": None})
    with pytest.raises(AdaSpecError, match="no mask token"):
        run_training(target_directory, [prompts], tmp_path / "run", settings, torch.device("cpu"))
    assert not (tmp_path / "run" / "trajectories").exists()


def test_problems_are_one_line_and_exit_code_2(
    target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere.jsonl")
    with pytest.raises(SystemExit) as caught:
        app(["train", "--target", str(target_directory), "--prompts", nowhere,
             "--out", str(tmp_path / "out")])  # fmt: skip
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("adaspec: the prompt file")
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_is_refused_before_anything_is_made(
    target_directory: Path, prompts: Path, tmp_path: Path
) -> None:
    result = run(target_directory, prompts, tmp_path / "run", extra="learning_rate = 1.0")
    assert isinstance(result.exception, AdaSpecError)
    assert "learning_rate" in str(result.exception)
    assert not (tmp_path / "run").exists()
