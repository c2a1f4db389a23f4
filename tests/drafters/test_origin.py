"""What a drafter was trained with: marks that stay, and marks that notice a change."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.drafters.origin import (
    Expectation,
    Origin,
    compare,
    head_differs,
    head_sketch,
    mark_target,
    read_origin,
    write_origin,
)
from adaspec.errors import AdaSpecError
from tests.server.tiny_models import write_target

BUNDLED = Path(str(files("adaspec"))) / "bundled" / "smollm2-135m-instruct-b16"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    shutil.copytree(target, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def origin(target: Path) -> Origin:
    expected = Expectation(committed_per_pass=2.5, survival=(0.7, 0.5), setting="a test")
    return Origin(target=mark_target(target), taps=(0, 1), expected=expected)


def test_an_origin_is_read_as_it_was_written(origin: Origin, tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    write_origin(tmp_path, origin)
    assert read_origin(tmp_path) == origin
    assert [path.name for path in tmp_path.iterdir()] == ["origin.json"]


@pytest.mark.parametrize("content", [b"{", b'{"target": {}}', b" " * (2 << 20), b"\xff"])
def test_a_damaged_origin_is_refused_with_a_way_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "origin.json").write_bytes(content)
    with pytest.raises(AdaSpecError, match="or delete it"):
        read_origin(tmp_path)


def test_a_copy_of_the_target_is_the_same(origin: Origin, copy: Path) -> None:
    assert compare(origin, mark_target(copy), (0, 1)) == []


def test_the_files_of_a_target_may_be_cut_otherwise(origin: Origin, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    (copy / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, copy / f"model-{number}.safetensors")
    assert mark_target(copy) == origin.target


@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_every_changed_tensor_is_noticed(origin: Origin, copy: Path, scale: float) -> None:
    tensors = load_file(copy / "model.safetensors")
    for name in tensors:
        save_file(tensors | {name: scale * tensors[name]}, copy / "model.safetensors")
        assert [m.part for m in compare(origin, mark_target(copy), (0, 1))] == ["target"]


def test_likelier_causes_come_first(origin: Origin, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "chat_template.jinja").write_text("another")
    found = compare(origin, mark_target(copy), (1, 0))
    assert [mismatch.part for mismatch in found] == ["taps", "head", "template"]


def test_what_is_not_known_of_either_is_no_difference(origin: Origin) -> None:
    unknown = msgspec.structs.replace(
        origin.target, weights=None, vocabulary=None, template=None, head=()
    )
    assert compare(origin, unknown, (0, 1)) == []
    assert compare(msgspec.structs.replace(origin, target=unknown), origin.target, (0, 1)) == []


def rounded(weight: torch.Tensor, levels: int) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / levels
    return (weight / scale).round() * scale


def test_a_head_is_known_again_in_shards_and_other_floats() -> None:
    weight = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0))
    whole = head_sketch(weight, 1000)
    assert [number for number, _ in whole] == list(range(32))
    shards = head_sketch(weight[:400], 1000) + head_sketch(weight[400:], 1000, 400)
    values = [value for _, value in whole]
    assert [number for number, _ in shards] == list(range(32))
    assert [value for _, value in shards] == pytest.approx(values, rel=1e-4)
    padded = torch.cat([weight, torch.zeros(24, 512)])
    for same in (padded, weight.to(torch.bfloat16), weight.half()):
        assert not head_differs(values, head_sketch(same, 1000))
    for other in (rounded(weight, 7), weight.to(torch.float8_e4m3fn).float(), weight.roll(1, 0)):
        assert head_differs(values, head_sketch(other, 1000))


def test_expectations_add_up_to_the_measured_acceptance() -> None:
    told = Expectation(committed_per_pass=2.5, survival=(0.8, 0.4, 0.3), setting="a test")
    assert told.accepted_by_length() == pytest.approx((0.0, 0.0, 0.8, 1.2, 1.5))
    nothing = Expectation(committed_per_pass=1.0, survival=(0.0, 0.0), setting="a test")
    assert nothing.accepted_by_length() == (0.0, 0.0, 0.0, 0.0)


def test_the_bundled_drafter_has_an_origin() -> None:
    origin = read_origin(BUNDLED)
    config = read_drafter_config(BUNDLED)
    assert origin is not None
    assert origin.taps == config.target_layer_ids
    assert None not in (origin.target.weights, origin.target.vocabulary, origin.target.template)
    assert len(origin.target.head) == 32
    measured = json.loads((BUNDLED / "train_result_2.json").read_text())["dev"]["mt_bench"]
    assert origin.expected is not None
    assert origin.expected.committed_per_pass == measured["committed_per_pass"]
    assert len(origin.expected.survival) == config.block_size - 1
