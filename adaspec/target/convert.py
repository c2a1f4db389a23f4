"""GGUF to Hugging Face directory: SmolLM2-135M-Instruct, dequantised once."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

CONTEXT_LENGTH = 8192


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write the model, tokenizer, chat template and generation config into ``directory``.

    Weights are kept in float32: a Q4_1 weight is ``scale * q + minimum``, and 82% of these products
    are not bfloat16 numbers (48% not float16), so a narrower file would not be the released model.
    config.json names bfloat16, in which the model was trained, as the type to run in.
    """
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The output matrix is the embedding; it is stored once.
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    config = model.config.to_dict()
    # What names this conversion and not the model.
    provenance = ("_name_or_path", "_model_name_or_path", "transformers_version")
    for key in ("quantization_config", *provenance):
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _save_tokenizer(gguf, directory)


def _save_tokenizer(gguf: Path, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT_LENGTH
    # GGUF names the pre-tokenizer ("smollm") and transformers takes it for GPT-2's. SmolLM2 splits
    # off every digit first, which changes how spaces before digits are grouped ("\n\n1.").
    # Some versions of transformers add a normalizer of their own, too; SmolLM2 has none.
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(directory)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
