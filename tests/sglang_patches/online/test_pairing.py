"""What a server says at its start about a drafter that was trained with something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adaspec.drafters.origin import Expectation, Origin, mark_target, write_origin
from sglang_patches.online.pairing import check_pairing, quantised_by
from tests.server.tiny_models import HIDDEN, TAPS, VOCAB_SIZE, write_target

EXPECTED = Expectation(committed_per_pass=2.0, survival=(0.6, 0.3, 0.1), setting="a test")


class Pair:
    """A target, a drafter with an origin, and how they are served."""

    def __init__(self, target: Path, drafter: Path, model: nn.Module) -> None:
        self.target = target
        self.drafter = drafter
        self.model = model
        self.args = SimpleNamespace(
            model_path=str(target),
            tokenizer_path=str(target),
            speculative_draft_model_path=str(drafter),
            chat_template=None,
            quantization=None,
        )
        self.head = self._load_head()
        self.origin = Origin(target=mark_target(target), taps=TAPS, expected=EXPECTED)
        write_origin(drafter, self.origin)

    def _load_head(self) -> nn.Module:
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
        from sglang.srt.runtime_context import get_parallel

        with get_parallel().override(tp_rank=0, tp_size=1):
            head = ParallelLMHead(VOCAB_SIZE, HIDDEN)
        weight = load_file(self.target / "model.safetensors")["lm_head.weight"]
        head.weight.data[:VOCAB_SIZE] = weight
        return head

    def found(self) -> dict[str, str]:
        """Sentences by part, in the order in which they are found."""
        target = nn.Module()
        target.lm_head = self.head
        worker = SimpleNamespace(
            server_args=self.args,
            draft_model=self.model,
            model_runner=SimpleNamespace(model=target),
        )
        origin, differences = check_pairing(worker)
        assert origin is None or origin.expected == EXPECTED
        return {difference.part: difference.sentence for difference in differences}


@pytest.fixture
def pair(model: nn.Module, drafter: Path, tmp_path: Path) -> Pair:
    copy = tmp_path / "drafter"
    shutil.copytree(drafter, copy)
    return Pair(write_target(tmp_path / "target"), copy, model)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_served_as_trained_is_all_right(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.found() == {}
    assert not [r for r in caplog.records if r.name.endswith("pairing")]


def test_wrong_taps(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(
        pair.drafter / "config.json",
        lambda config: config["dflash_config"].update(target_layer_ids=[1, 0]),
    )
    found = pair.found()
    assert list(found) == ["taps"]
    assert "[1, 0] but was trained with [0, 1]" in found["taps"]
    assert found["taps"] in caplog.text


def test_another_template_of_the_target(pair: Pair) -> None:
    (pair.target / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert list(pair.found()) == ["template"]


def test_another_template_of_the_server(pair: Pair, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages[0]['content'] }}")
    pair.args.chat_template = str(given)
    assert list(pair.found()) == ["template"]
    pair.args.chat_template = "chatml"
    assert list(pair.found()) == ["template"]


def test_the_same_template_from_a_file_is_the_same(pair: Pair, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    own = pair.target / "chat_template.jinja"
    text = own.read_text() if own.is_file() else ""
    if not text:
        text = json.loads((pair.target / "tokenizer_config.json").read_text())["chat_template"]
    given.write_text(text + "\n")
    pair.args.chat_template = str(given)
    assert pair.found() == {}


def test_another_tokenizer(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(pair.target, other)

    def swap_two(content: dict) -> None:
        vocabulary = content["model"]["vocab"]
        a, b = sorted(vocabulary)[:2]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]

    rewrite(other / "tokenizer.json", swap_two)
    pair.args.tokenizer_path = str(other)
    assert list(pair.found()) == ["tokenizer"]


def test_another_target(pair: Pair, tmp_path: Path) -> None:
    pair.args.model_path = str(write_target(tmp_path / "other", seed=9))
    assert list(pair.found()) == ["target"]


def test_a_target_that_is_quantised_by_the_server(pair: Pair) -> None:
    pair.args.quantization = "fp8"
    found = pair.found()
    assert list(found) == ["head"]
    assert "fp8-quantised" in found["head"]
    pair.args.quantization = "unquant"
    assert pair.found() == {}


def test_a_target_that_comes_quantised(pair: Pair) -> None:
    rewrite(
        pair.target / "config.json",
        lambda config: config.update(quantization_config={"quant_method": "awq"}),
    )
    pair.args.quantization = "awq_marlin"  # SGLang's name of what runs it
    assert "awq-quantised" in pair.found()["head"]
    marks = mark_target(pair.target)
    write_origin(pair.drafter, msgspec.structs.replace(pair.origin, target=marks))
    assert pair.found() == {}


def test_an_output_matrix_that_was_rounded_when_it_was_loaded(pair: Pair) -> None:
    weight = pair.head.weight.data
    pair.head.weight.data = weight.to(torch.bfloat16).to(weight.dtype)
    assert pair.found() == {}
    scale = weight.abs().amax(dim=1, keepdim=True) / 7
    pair.head.weight.data = (weight / scale).round() * scale  # 4 bits
    found = pair.found()
    assert list(found) == ["head"]
    assert "in memory" in found["head"]


def test_layers_say_by_what_they_are_quantised(pair: Pair) -> None:
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    linear = ReplicatedLinear(16, 16, bias=False)
    assert quantised_by(linear) is None
    assert quantised_by(nn.Linear(2, 2)) is None
    # Made without its loader, which asks for a GPU.
    linear.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    assert quantised_by(linear) == "Fp8LinearMethod"


def test_a_quantised_output_matrix_and_drafter_are_told_without_an_origin(pair: Pair) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    (pair.drafter / "origin.json").unlink()
    assert pair.found() == {}
    pair.head.quant_method = method
    assert list(pair.found()) == ["head"]
    pair.model.layers[0].mlp.down_proj.quant_method = method
    found = pair.found()
    assert list(found) == ["drafter quantised", "head"]
    assert "--speculative-draft-model-quantization unquant" in found["drafter quantised"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pair: (pair.drafter / "origin.json").write_text("{"),
        lambda pair: (pair.target / "config.json").unlink(),
        lambda pair: setattr(pair.args, "model_path", "nobody/has-this-model"),
        lambda pair: setattr(pair.args, "chat_template", "x" * 5000),
    ],
)
def test_nothing_that_cannot_be_read_keeps_a_server_from_starting(
    pair: Pair, damage: Callable[[Pair], object], caplog: pytest.LogCaptureFixture
) -> None:
    damage(pair)
    pair.found()
    assert [r for r in caplog.records if r.name.endswith("pairing")]
