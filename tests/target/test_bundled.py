"""The bundled drafter: small enough, complete, made for SmolLM2, and described truthfully."""

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch

import adaspec
from adaspec.drafters.checkpoint import WEIGHTS_NAME, check_pair, load_drafter
from adaspec.drafters.config import render_config
from adaspec.training.config import TrainConfig, load_train_config

DIRECTORY = Path(adaspec.__file__).parent / "bundled" / "smollm2-135m-instruct-b16"
# Of SmolLM2-135M-Instruct's config.json, as the conversion writes it.
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@pytest.fixture(scope="module")
def card() -> str:
    return (DIRECTORY / "README.md").read_text()


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((DIRECTORY / "train_result_2.json").read_text())


def test_it_fits_the_size_and_the_target() -> None:
    assert (DIRECTORY / WEIGHTS_NAME).stat().st_size <= 26_000_000
    drafter = load_drafter(DIRECTORY)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert drafter.config.block_size == 16
    check_pair(drafter.config, SMOLLM2)
    assert json.loads((DIRECTORY / "config.json").read_text()) == render_config(drafter.config)


def test_the_card_reports_what_the_run_measured(card: str, result: dict) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", card, re.MULTILINE))
    assert rows.keys() == result["dev"].keys()
    for name, measured in result["dev"].items():
        cells = [cell.strip() for cell in rows[name].split("|")]
        survival = [measured["survival"][k - 1] for k in (1, 2, 3, 4, 6, 8, 12, 15)]
        assert cells[:3] == [
            str(measured["responses"]),
            str(measured["passes"]),
            f"{measured['committed_per_pass']:.3f}",
        ]
        assert cells[3:] == [f"{share:.2f}" for share in survival]


def test_the_training_configuration_is_the_one_that_ran(result: dict) -> None:
    ran = msgspec.convert(result["config"], TrainConfig)
    assert load_train_config(DIRECTORY / "training.toml") == ran
    assert "max_seconds" not in tomllib.loads((DIRECTORY / "training.toml").read_text())["optim"]
    drafter = load_drafter(DIRECTORY).config
    assert drafter.num_hidden_layers == ran.drafter.num_layers
    assert drafter.intermediate_size == ran.drafter.intermediate_size
    assert drafter.mask_token_id == ran.drafter.mask_token_id
    parameters = sum(p.numel() for p in load_drafter(DIRECTORY).parameters())
    assert parameters == result["parameters"]
