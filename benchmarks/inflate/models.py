"""Directories of inflated models, written layer by layer: an 8B target takes 15 GB of disk."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaspec.drafters.checkpoint import read_model_config
from adaspec.errors import AdaSpecError
from benchmarks.inflate.fill import Inflation, Shape

_MATRICES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("input_layernorm", "post_attention_layernorm"),
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face configuration."""
    return Shape(**{name: int(config[name]) for name in Shape.__dataclass_fields__})


def inflate_target(
    source: Path,
    directory: Path,
    large: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> None:
    """Write a Llama of another shape that says what the Llama in ``source`` says.

    Raises:
        AdaSpecError: if it is no Llama with tied embeddings, or does not fit.
    """
    config = read_model_config(source, "target")
    if config.get("architectures") != ["LlamaForCausalLM"] or not config["tie_word_embeddings"]:
        raise AdaSpecError(
            f"{source} is no Llama with tied embeddings, which is all that can be inflated."
        )
    small = shape_of(config)
    inflation = Inflation(small, large, device=device or torch.device("cpu"), dtype=dtype)
    out = _Shards(directory)
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        out.add(
            {
                "model.embed_tokens.weight": inflation.embedding(
                    weights.get_tensor("model.embed_tokens.weight")
                ),
                "model.norm.weight": inflation.hidden_norm(weights.get_tensor("model.norm.weight")),
            }
        )
        for number in range(large.num_hidden_layers):
            prefix = f"model.layers.{number}."
            if number < small.num_hidden_layers:
                layer = {n: weights.get_tensor(f"{prefix}{n}.weight") for n in _MATRICES}
                made = inflation.layer(layer, has_head_norms=False)
            else:
                made = inflation.empty_layer()
            out.add({f"{prefix}{name}.weight": tensor for name, tensor in made.items()})
    _finish(out, source, config, large, inflation.eps_scale, dtype)


def inflate_drafter(
    source: Path,
    directory: Path,
    large: Shape,
    *,
    target_layers: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> None:
    """Write a DFlash drafter of another shape for an inflated target.

    Args:
        target_layers: of the inflated target.

    Raises:
        AdaSpecError: if it has other layers than the large one, or does not fit.
    """
    config = read_model_config(source, "drafter")
    small = shape_of(config)
    if small.num_hidden_layers != large.num_hidden_layers:
        raise AdaSpecError(
            f"the drafter in {source} has {small.num_hidden_layers} layers, and a layer cannot be "
            f"added to it; choose a shape of as many, not of {large.num_hidden_layers}."
        )
    inflation = Inflation(small, large, device=device or torch.device("cpu"), dtype=dtype)
    out = _Shards(directory)
    taps = len(config["dflash_config"]["target_layer_ids"])
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        fc = inflation.context_projection(weights.get_tensor("fc.weight"), taps)
        tensors = {"fc.weight": fc}
        for name in ("hidden_norm.weight", "norm.weight"):
            tensors[name] = inflation.hidden_norm(weights.get_tensor(name))
        for number in range(large.num_hidden_layers):
            prefix = f"layers.{number}."
            layer = {
                name: weights.get_tensor(f"{prefix}{name}.weight")
                for name in (*_MATRICES, *_HEAD_NORMS)
            }
            made = inflation.layer(layer, has_head_norms=True)
            tensors |= {f"{prefix}{name}.weight": tensor for name, tensor in made.items()}
        out.add(tensors)
    config["num_target_layers"] = target_layers
    _finish(out, source, config, large, inflation.eps_scale, dtype)


class _Shards:
    """Files of weights, and which tensor is in which."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=False)
        self.directory = directory
        self._files: list[str] = []
        self._map: dict[str, str] = {}
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        name = f"model-{len(self._files):05d}.safetensors"
        on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(on_host, self.directory / name, metadata={"format": "pt"})
        self._files.append(name)
        self._map |= dict.fromkeys(on_host, name)
        self._bytes += sum(tensor.nbytes for tensor in on_host.values())

    def close(self) -> None:
        if len(self._files) == 1:
            (self.directory / self._files[0]).rename(self.directory / "model.safetensors")
            return
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._map}
        path = self.directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1) + "\n")


def _finish(
    out: _Shards,
    source: Path,
    config: Mapping[str, Any],
    large: Shape,
    eps_scale: float,
    dtype: torch.dtype,
) -> None:
    """Close the shards, and write the configuration and what else the directory holds."""
    out.close()
    changed = {
        **config,
        **asdict(large),
        "rms_norm_eps": config["rms_norm_eps"] * eps_scale,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if "layer_types" in config:
        changed["layer_types"] = ["full_attention"] * large.num_hidden_layers
    (out.directory / "config.json").write_text(json.dumps(changed, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, out.directory / name)
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", out.directory / "generation_config.json")
