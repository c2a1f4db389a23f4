"""A fresh drafter for a target."""

from typing import Any

import torch
from torch import nn

from adaspec.drafters.config import DrafterConfig, evenly_spaced_layers
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.training.config import DrafterSection
from adaspec.training.target_model import TargetModel

_INITIAL_STD = 0.02


def drafter_config(section: DrafterSection, target: TargetModel, tokenizer: Any) -> DrafterConfig:
    """The drafter's configuration, filled up from the target.

    Raises:
        AdaSpecError: if there is no mask token, or the taps are not ascending: a server delivers
            them in the order of the layers.
    """
    config = target.config
    mask = section.mask_token_id
    if mask is None:
        mask = tokenizer.mask_token_id
    if mask is None:
        raise AdaSpecError(
            "the target's tokenizer has no mask token; set drafter.mask_token_id to a token that "
            "the target never meets, such as a reserved one."
        )
    heads = int(config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    taps = section.target_layer_ids or evenly_spaced_layers(layers, section.num_taps)
    if list(taps) != sorted(set(taps)):
        raise AdaSpecError(
            f"drafter.target_layer_ids is {list(taps)}, but taps come in the order of the layers, "
            f"each once; use {sorted(set(taps))}."
        )
    return DrafterConfig(
        hidden_size=int(config.hidden_size),
        intermediate_size=section.intermediate_size or int(config.intermediate_size),
        num_hidden_layers=section.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        block_size=section.block_size,
        mask_token_id=int(mask),
        target_layer_ids=taps,
        num_target_layers=layers,
        rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=float(config.rope_parameters["rope_theta"]),
        max_position_embeddings=int(config.max_position_embeddings),
        length_head_width=section.length_head_width,
    )


def new_drafter(
    section: DrafterSection, config: DrafterConfig, target: TargetModel
) -> BlockDrafter:
    """A drafter with fresh float32 weights on the target's device.

    The final norm starts as the target's, because the target's output matrix reads it. Matrices
    that write into the residual stream start smaller by ``sqrt(2 * layers)`` (GPT-2).

    Raises:
        AdaSpecError: if layers are to start from target layers that do not exist or fit.
    """
    drafter = BlockDrafter(config)
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            shrink = (2 * config.num_hidden_layers) ** -0.5
            writes = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=_INITIAL_STD * (shrink if writes else 1.0))
    with torch.no_grad():
        drafter.norm.weight.copy_(target.final_norm)
        # The mean of the taps is a better first context feature than a random mixture.
        taps = len(config.target_layer_ids)
        identity = torch.eye(config.hidden_size).repeat(1, taps) / taps
        drafter.fc.weight.add_(identity)
    if section.initialise_from is not None:
        _copy_layers(drafter, target, section.initialise_from)
    return drafter.to(target.device)


def _copy_layers(drafter: BlockDrafter, target: TargetModel, sources: tuple[int, ...]) -> None:
    if len(sources) != len(drafter.layers):
        raise AdaSpecError(
            f"drafter.initialise_from names {len(sources)} target layers for "
            f"{len(drafter.layers)} drafter layers; name one for each."
        )
    available = len(target.decoder.layers)
    for layer, source in zip(drafter.layers, sources, strict=True):
        if not 0 <= source < available:
            raise AdaSpecError(
                f"drafter.initialise_from names layer {source}, but the target has layers 0 to "
                f"{available - 1}; use one of those."
            )
        theirs = dict(target.decoder.layers[source].named_parameters())
        for name, parameter in layer.named_parameters():
            # QK-norms exist in the drafter only and keep their ones, unless the target has them.
            if name not in theirs and "_norm" in name:
                continue
            if name not in theirs or theirs[name].shape != parameter.shape:
                raise AdaSpecError(
                    f"drafter.initialise_from: {name} of target layer {source} does not have the "
                    f"drafter's shape {list(parameter.shape)}; leave initialise_from out."
                )
            parameter.data.copy_(theirs[name])
