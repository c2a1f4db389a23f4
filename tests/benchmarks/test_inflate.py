"""Inflated models say what the small ones say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from adaspec.drafters.checkpoint import check_drafter_for_target, load_drafter, read_model_config
from adaspec.errors import AdaSpecError
from benchmarks.inflate.fill import Inflation, Shape
from benchmarks.inflate.models import inflate_drafter, inflate_target, shape_of
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.tiny_models import LAYERS, TAPS, write_target

LARGE = Shape(
    hidden_size=192,
    intermediate_size=232,
    num_hidden_layers=LAYERS + 2,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=32,
)
PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(4)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with tied embeddings."""
    directory = write_target(tmp_path_factory.mktemp("small") / "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small") / "drafter"
    return write_fitted_drafter(directory, target, PROMPTS, steps=60)


@pytest.fixture(scope="module")
def large_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "target"
    inflate_target(target, directory, LARGE, dtype=torch.float32)
    return directory


@torch.no_grad()
def test_logits_and_taps_are_the_small_targets(target: Path, large_target: Path) -> None:
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (target, large_target)
    ]
    assert shape_of(models[1].config.to_dict()) == LARGE
    rows = torch.randint(3, 500, (3, 40), generator=torch.Generator().manual_seed(2))
    small, large = (model(rows, output_hidden_states=True) for model in models)
    torch.testing.assert_close(large.logits, small.logits, atol=2e-4, rtol=2e-4)
    width = small.hidden_states[0].shape[-1]
    for layer in range(LAYERS):
        states = large.hidden_states[layer]
        torch.testing.assert_close(
            states[..., :width], small.hidden_states[layer], atol=2e-4, rtol=2e-4
        )
        assert not states[..., width:].any()
    answers = [
        model.generate(rows[:1], max_new_tokens=30, do_sample=False, pad_token_id=1)
        for model in models
    ]
    assert torch.equal(*answers)


@torch.no_grad()
def test_drafts_are_the_small_drafters(
    target: Path, drafter: Path, large_target: Path, tmp_path: Path
) -> None:
    shape = replace(LARGE, num_hidden_layers=read_model_config(drafter, "d")["num_hidden_layers"])
    inflate_drafter(
        drafter,
        tmp_path / "drafter",
        shape,
        target_layers=LARGE.num_hidden_layers,
        dtype=torch.float32,
    )
    check_drafter_for_target(tmp_path / "drafter", large_target)
    drafts = []
    for model_path, drafter_path in ((target, drafter), (large_target, tmp_path / "drafter")):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        rows = torch.tensor([PROMPTS[0] * 3])
        states = model(rows, output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1] for layer in TAPS], dim=-1)[0]
        embedding = model.get_input_embeddings().weight
        drafts.append(load_drafter(drafter_path).draft(taps, 7, embedding, embedding))
    torch.testing.assert_close(drafts[1], drafts[0], atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "choose more"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(
    target: Path, tmp_path: Path, change: dict[str, int], word: str
) -> None:
    with pytest.raises(AdaSpecError, match=word):
        inflate_target(target, tmp_path / "out", replace(LARGE, **change))


def test_new_entries_are_mostly_not_zero() -> None:
    small = replace(LARGE, hidden_size=32, intermediate_size=40, head_dim=16)
    inflation = Inflation(small, LARGE, device=torch.device("cpu"), dtype=torch.bfloat16)
    layer = inflation.empty_layer()
    for name in ("gate_proj", "up_proj"):
        assert (layer[f"mlp.{name}"] != 0).float().mean() > 0.8
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert not layer[name].any()
