"""Drafter directories: every difference is refused in a sentence, and what is written is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaspec.drafters.checkpoint import (
    INDEX_NAME,
    WEIGHTS_NAME,
    check_drafter_for_target,
    check_pair,
    load_drafter,
    save_drafter,
)
from adaspec.drafters.config import render_config
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from tests.versions.tiny import TINY, tiny_drafter_directory

NAME = "layers.1.mlp.up_proj.weight"
TARGET = {"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 4}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_drafter_directory(tmp_path / "drafter")


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_NAME)


def shard(directory: Path, repeated: bool = False) -> None:
    """Split the weights of a directory in two, with an index."""
    tensors = load_file(directory / WEIGHTS_NAME)
    (directory / WEIGHTS_NAME).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    weight_map = {name: file for file, part in parts.items() for name in part}
    if repeated:
        parts["b.safetensors"].append(names[0])
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = BlockDrafter(TINY)
    save_drafter(drafter, tmp_path / "drafter", torch.float32)
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == TINY
    state = loaded.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in drafter.state_dict().items())


def test_weights_are_bfloat16_unless_asked_otherwise(tmp_path: Path) -> None:
    save_drafter(BlockDrafter(TINY), tmp_path / "drafter")
    assert {p.dtype for p in load_drafter(tmp_path / "drafter").parameters()} == {torch.bfloat16}
    wide = load_drafter(tmp_path / "drafter", torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensor_names_are_the_published_ones(directory: Path) -> None:
    layer = [
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{number}.{name}" for number in range(2) for name in layer}
    assert set(load_file(directory / WEIGHTS_NAME)) == expected


def test_files_are_readable_to_others(directory: Path) -> None:
    allowed = directory.stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {allowed}


def test_an_adaflash_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    source, copy = tmp_path / "adaflash", tmp_path / "copy"
    tiny_drafter_directory(source)
    head = {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 12}
    config = render_config(TINY, "float32")
    config["dflash_config"] |= head | {"thresh_head_direct_len": True}
    (source / "config.json").write_text(json.dumps(config))
    prefix = "thresh_head_two_model"
    shapes = {
        "down.weight": (12, 32), "down.bias": (12,),
        "res.0.weight": (12, 12), "res.0.bias": (12,),
        "out.weight": (1, 12), "out.bias": (1,),
    }  # fmt: skip
    random = {f"{prefix}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    rewrite(source, lambda tensors: tensors.update(random))

    drafter = load_drafter(source)
    assert drafter.thresh_head_two_model is not None
    save_drafter(drafter, copy, torch.float32)
    assert json.loads((copy / "config.json").read_text()) == config
    before, after = load_file(source / WEIGHTS_NAME), load_file(copy / WEIGHTS_NAME)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    rewrite(source, lambda tensors: tensors.pop(f"{prefix}.out.bias"))
    with pytest.raises(AdaSpecError, match=f"missing tensors {prefix}.out.bias"):
        load_drafter(source)


def test_a_head_the_configuration_does_not_name_is_refused(directory: Path) -> None:
    rewrite(
        directory, lambda tensors: tensors.update({"thresh_head_two_model.out.bias": torch.ones(1)})
    )
    with pytest.raises(AdaSpecError, match=r"unknown tensors thresh_head_two_model\.out\.bias"):
        load_drafter(directory)


def test_all_problems_stand_in_one_sentence(directory: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["layers.9.mlp.up_proj.weight"] = tensors.pop(NAME)
        tensors["norm.weight"] = torch.ones(3)
        tensors["fc.weight"][0, 0] = torch.nan
        tensors["hidden_norm.weight"] = torch.ones(16, dtype=torch.int8)

    rewrite(directory, damage)
    with pytest.raises(AdaSpecError) as caught:
        load_drafter(directory)
    for part in (
        "unknown tensors layers.9.mlp.up_proj.weight",
        f"missing tensors {NAME}",
        "norm.weight has shape [3] instead of [16]",
        "fc.weight holds NaN or infinite values",
        "hidden_norm.weight has type torch.int8",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_neither_read_nor_written(
    directory: Path, value: float
) -> None:
    drafter = load_drafter(directory)
    before = (directory / WEIGHTS_NAME).read_bytes()
    with torch.no_grad():
        drafter.layers[0].mlp.up_proj.weight[0, 0] = value
    with pytest.raises(AdaSpecError, match="NaN or infinite"):
        save_drafter(drafter, directory)
    assert (directory / WEIGHTS_NAME).read_bytes() == before
    rewrite(directory, lambda tensors: tensors[NAME].fill_(value))
    with pytest.raises(AdaSpecError, match=f"{NAME} holds NaN or infinite"):
        load_drafter(directory)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(directory: Path, kept: int) -> None:
    path = directory / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(AdaSpecError, match="truncated or not a safetensors file"):
        load_drafter(directory)


def test_missing_files_are_named(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(AdaSpecError, match="nowhere does not exist"):
        load_drafter(tmp_path / "nowhere")
    (directory / WEIGHTS_NAME).unlink()
    with pytest.raises(AdaSpecError, match=rf"{WEIGHTS_NAME} is missing"):
        load_drafter(directory)
    (directory / "config.json").unlink()
    with pytest.raises(AdaSpecError, match=r"has no config\.json"):
        load_drafter(directory)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_configuration_is_named(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(AdaSpecError, match=r"config\.json"):
        load_drafter(directory)


def test_shards_are_read_as_one(directory: Path) -> None:
    whole = load_drafter(directory).state_dict()
    shard(directory)
    parts = load_drafter(directory).state_dict()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_a_tensor_in_two_shards_is_refused(directory: Path) -> None:
    shard(directory, repeated=True)
    with pytest.raises(AdaSpecError, match=r"repeats the tensor fc\.weight"):
        load_drafter(directory)


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory)
    (directory / "b.safetensors").unlink()
    with pytest.raises(AdaSpecError, match=r"b\.safetensors is missing"):
        load_drafter(directory)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_cannot_lead_out_of_its_directory(directory: Path, name: str) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(AdaSpecError, match="not a plain file name"):
        load_drafter(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"fc.weight": 3}}', "{}"])
def test_a_damaged_index_is_refused(directory: Path, text: str) -> None:
    (directory / INDEX_NAME).write_text(text)
    with pytest.raises(AdaSpecError, match="index"):
        load_drafter(directory)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 32), ("vocab_size", 41), ("num_hidden_layers", 5)]
)
def test_a_drafter_of_another_target_is_refused(key: str, value: int) -> None:
    check_pair(TINY, TARGET)
    check_pair(TINY, {"text_config": TARGET})
    with pytest.raises(AdaSpecError, match=f"{key} {TARGET[key]}.* has {value}"):
        check_pair(TINY, TARGET | {key: value})


def test_taps_must_lie_in_the_target(tmp_path: Path) -> None:
    free = {k: v for k, v in render_config(TINY).items() if k != "num_target_layers"}
    directory = tiny_drafter_directory(tmp_path / "drafter")
    (directory / "config.json").write_text(json.dumps(free))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET | {"num_hidden_layers": 3}))
    assert check_drafter_for_target(directory, target).num_target_layers is None
    (target / "config.json").write_text(json.dumps(TARGET | {"num_hidden_layers": 2}))
    with pytest.raises(AdaSpecError, match="taps target layer 1"):
        check_drafter_for_target(directory, target)
    (target / "config.json").write_text(json.dumps({"hidden_size": 16, "vocab_size": 40}))
    with pytest.raises(AdaSpecError, match="num_hidden_layers"):
        check_drafter_for_target(directory, target)
