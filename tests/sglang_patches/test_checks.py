"""Every bad input is refused before a model is loaded, in one sentence that names the thing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaspec.errors import AdaSpecError
from sglang_patches.checks import check_server_args
from tests.server.tiny_models import write_drafter, write_target

NORM = "layers.0.self_attn.k_norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    return directory


@pytest.fixture
def pair(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target and a drafter of block size 4 that fit, to be spoiled by one test."""
    monkeypatch.delenv("ADASPEC_CONFIG", raising=False)
    return Path(shutil.copytree(originals, tmp_path / "pair"))


def arguments(pair: Path, **changes: Any) -> Any:
    """The fields of SGLang's arguments that the checks read."""
    fields = {
        "model_path": str(pair / "target"),
        "speculative_draft_model_path": str(pair / "drafter"),
        "speculative_num_draft_tokens": None,
        "speculative_dflash_block_size": None,
        "speculative_draft_window_size": None,
        "speculative_use_block_verification": False,
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_lora": None,
        "enable_deterministic_inference": False,
        "disaggregation_mode": "null",
        "startup_weight_load_mode": "serial",
    }
    return SimpleNamespace(**{**fields, **changes})


def refusal(pair: Path, **changes: Any) -> str:
    with pytest.raises(AdaSpecError) as refused:
        check_server_args(arguments(pair, **changes))
    return str(refused.value)


def configure(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(pair: Path, change: Callable[[Tensors], Any]) -> None:
    path = pair / "drafter" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_pair_that_fits_is_accepted(pair: Path) -> None:
    check_server_args(arguments(pair, speculative_num_draft_tokens=4))


def test_missing_flag(pair: Path) -> None:
    message = refusal(pair, speculative_draft_model_path=None)
    assert "--speculative-draft-model-path" in message


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--pp-size", {"pp_size": 2}),
        ("--enable-dp-attention", {"enable_dp_attention": True}),
        ("--enable-lora", {"enable_lora": True}),
        ("--speculative-draft-window-size", {"speculative_draft_window_size": 64}),
        ("--enable-deterministic-inference", {"enable_deterministic_inference": True}),
        ("--startup-weight-load-mode", {"startup_weight_load_mode": "overlap"}),
        ("--disaggregation-mode", {"disaggregation_mode": "decode"}),
        ("--speculative-use-block-verification", {"speculative_use_block_verification": True}),
    ],
)
def test_unsupported_flag(pair: Path, flag: str, changes: dict[str, Any]) -> None:
    assert flag in refusal(pair, **changes)


@pytest.mark.parametrize("field", ["speculative_num_draft_tokens", "speculative_dflash_block_size"])
def test_block_size_of_another_drafter(pair: Path, field: str) -> None:
    message = refusal(pair, **{field: 9})
    assert "blocks of 4 tokens, not 9" in message
    assert "verify.length" in message


@pytest.mark.parametrize("role", ["drafter", "target"])
def test_missing_directory(pair: Path, role: str) -> None:
    shutil.rmtree(pair / role)
    assert str(pair / role) in refusal(pair)


def test_missing_files(pair: Path) -> None:
    (pair / "drafter" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(pair)
    (pair / "drafter" / "config.json").unlink()
    assert "has no config.json" in refusal(pair)


def test_configuration_that_is_not_json(pair: Path) -> None:
    (pair / "drafter" / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(pair)


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [("hidden_size", 128, 64), ("vocab_size", 600, 512), ("num_hidden_layers", 5, 3)],
)
def test_drafter_of_another_target(pair: Path, key: str, ours: int, theirs: int) -> None:
    name = "num_target_layers" if key == "num_hidden_layers" else key
    configure(pair / "drafter", **{name: ours})
    message = refusal(pair)
    assert f"{key} {ours}" in message
    assert str(theirs) in message


@pytest.mark.parametrize("taps", [[1, 0], [0, 0]])
def test_taps_that_sglang_would_deliver_otherwise(pair: Path, taps: list[int]) -> None:
    configure(pair / "drafter", dflash_config={"mask_token_id": 2, "target_layer_ids": taps})
    assert f"taps the target's layers {taps}" in refusal(pair)


def test_unknown_tensor(pair: Path) -> None:
    rewrite(pair, lambda tensors: tensors.update({"layers.0.extra.weight": torch.ones(2)}))
    assert "unknown tensors layers.0.extra.weight" in refusal(pair)


def test_missing_tensor(pair: Path) -> None:
    rewrite(pair, lambda tensors: tensors.pop(NORM))
    assert f"missing tensors {NORM}" in refusal(pair)


def test_tensor_of_another_shape(pair: Path) -> None:
    rewrite(pair, lambda tensors: tensors.update({NORM: torch.ones(8)}))
    assert f"{NORM} has shape [8] instead of [16]" in refusal(pair)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(pair: Path, value: float) -> None:
    rewrite(pair, lambda tensors: tensors[NORM].fill_(value))
    assert f"{NORM} holds NaN or infinite values" in refusal(pair)


@pytest.mark.parametrize("kept", [0, 7, 4096])
def test_truncated_weights(pair: Path, kept: int) -> None:
    path = pair / "drafter" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is truncated" in refusal(pair)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[verify]\nlenght = 3\n", "lenght"),
        ("[verfiy]\nlength = 3\n", "verfiy"),
        ("[verify]\nlength = 0\n", "$.verify.length"),
        ('[verify]\nlength = "3"\n', "$.verify.length"),
        ('[verify]\npolicy = "clever"\n', "$.verify.policy"),
        ("[verify\n", "not valid"),
        ("[verify]\nlength = 5\n", "verify.length is 5 but the drafter's block has 4 tokens"),
        (
            '[verify]\npolicy = "custom"\nfactory = "not_there:name"\n',
            "there is no module not_there",
        ),
    ],
    ids=[
        "unknown key",
        "unknown table",
        "zero",
        "text",
        "policy",
        "not TOML",
        "beyond the block",
        "custom policy",
    ],
)
def test_bad_option(pair: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str) -> None:
    config = pair / "adaspec.toml"
    config.write_text(text)
    monkeypatch.setenv("ADASPEC_CONFIG", str(config))
    assert named in refusal(pair)


def test_missing_configuration(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASPEC_CONFIG", str(pair / "none.toml"))
    assert "none.toml" in refusal(pair)


def test_another_sglang(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.version.__version__", "0.5.24")
    assert "0.5.23 only, but 0.5.24 is installed" in refusal(pair)


def test_a_rebuilt_sglang_of_the_same_release(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.version.__version__", "0.5.23+cu130")
    check_server_args(arguments(pair))
