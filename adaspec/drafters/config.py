"""The drafter's configuration, as z-lab DFlash and AdaFlash directories write it in config.json.

Keys may sit at the top level or inside ``dflash_config`` (upstream: SGLang
``dflash_utils.parse_dflash_draft_config``). What this network does not implement is refused by
name: a drafter that is loaded while a part of it is ignored still runs, and just accepts less.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaspec.errors import AdaSpecError

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block-diffusion drafter and of the target it reads.

    Attributes:
        block_size: tokens of a draft block, the anchor included.
        mask_token_id: token whose target embedding fills the undecided positions of a block.
        target_layer_ids: tapped target layers, 0-based; a tap is the output of that layer.
        num_target_layers: layers of the target the drafter was made for; ``None`` if not known.
        length_head_width: bottleneck width of AdaFlash's length head, or ``None`` without one.
        length_head_is_direct: AdaFlash's ``thresh_head_direct_len``: the head predicts a share of
            the block rather than a confidence threshold.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 32_768
    length_head_width: int | None = None
    length_head_is_direct: bool = True

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise AdaSpecError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.head_dim % 2:
            raise AdaSpecError(f"head_dim is {self.head_dim}, but RoPE turns pairs; make it even.")
        if self.block_size < 2:
            raise AdaSpecError(
                f"block_size is {self.block_size}, which leaves nothing to draft; use at least 2."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise AdaSpecError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; correct config.json."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise AdaSpecError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size} tokens; choose an id below it."
            )
        if not self.target_layer_ids:
            raise AdaSpecError("target_layer_ids is empty; name at least one target layer to tap.")
        limit = self.num_target_layers
        for layer in self.target_layer_ids:
            if layer < 0 or (limit is not None and layer > limit - 2):
                raise AdaSpecError(
                    f"target_layer_ids holds {layer}, but a target of {limit} layers can be tapped "
                    f"at layers 0 to {(limit or 0) - 2}; use ids in that range."
                )

    @property
    def context_width(self) -> int:
        """Width of a token's concatenated taps: number of taps x hidden size."""
        return len(self.target_layer_ids) * self.hidden_size


def evenly_spaced_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """DFlash's default taps: ``linspace(1, L - 3, num_taps)``, rounded.

    Upstream: SGLang ``dflash_utils.build_target_layer_ids``.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    if num_taps < 1 or last < 1:
        raise AdaSpecError(
            f"{num_taps} taps cannot be spread over a target of {num_target_layers} layers; "
            "give target_layer_ids explicitly."
        )
    return tuple(round(1 + tap * (last - 1) / (num_taps - 1)) for tap in range(num_taps))


# Key -> values that mean "this feature is off". Any other value is a network we do not have.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "conv_kernel_size": (None, 0),
    "conv_group_size": (None, 0),
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
    "projector_type": (None,),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "attention_bias": (None, False),
    "is_causal": (None, False),
    "use_gemma_norm": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
    "quantization_config": (None,),
    "use_prob_head": (None, False),
    "use_thresh_head_subsequent": (None, False),
    "hidden_act": (None, "silu"),
}


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Read a drafter's config.json (already decoded).

    Raises:
        AdaSpecError: if a key is missing, has the wrong type, or asks for a part of a network that
            is not implemented here.
    """
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise AdaSpecError("dflash_config is not an object; correct the drafter's config.json.")
    values = {**raw, **nested}
    for key, off in _UNSUPPORTED.items():
        if values.get(key) not in off:
            raise AdaSpecError(
                f"the drafter's config.json sets {key} to {values[key]!r}, which is not "
                "implemented; use a plain DFlash or AdaFlash drafter."
            )
    layers = _integer(values, "num_hidden_layers")
    kinds = values.get("layer_types") or ["full_attention"] * layers
    if kinds != ["full_attention"] * layers:
        raise AdaSpecError(
            f"the drafter's config.json sets layer_types to {kinds!r}, but only "
            f"{layers} full_attention layers are implemented; use a plain DFlash drafter."
        )
    hidden = _integer(values, "hidden_size")
    heads = _integer(values, "num_attention_heads")
    target_layers = _optional_integer(values, "num_target_layers")
    taps = values.get("target_layer_ids")
    if taps is None:
        if target_layers is None:
            raise AdaSpecError(
                "the drafter's config.json has neither target_layer_ids nor num_target_layers; "
                "add target_layer_ids to dflash_config."
            )
        taps = evenly_spaced_layers(target_layers, layers)
    elif not isinstance(taps, list) or not all(_is_integer(layer) for layer in taps):
        raise AdaSpecError(
            f"the drafter's config.json has target_layer_ids = {taps!r}, but needs a list of "
            "integers; correct it."
        )
    has_length_head = bool(values.get("use_thresh_head_two_model", False))
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_integer(values, "num_key_value_heads", heads),
        head_dim=_integer(values, "head_dim", hidden // max(heads, 1)),
        vocab_size=_integer(values, "vocab_size"),
        block_size=_integer(values, "block_size", 16),
        mask_token_id=_integer(values, "mask_token_id"),
        target_layer_ids=tuple(taps),
        num_target_layers=target_layers,
        rms_norm_eps=_positive(values, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(values),
        max_position_embeddings=_integer(values, "max_position_embeddings", 32_768),
        length_head_width=(
            _integer(values, "thresh_head_bottleneck_dim", 256) if has_length_head else None
        ),
        length_head_is_direct=bool(values.get("thresh_head_direct_len", not has_length_head)),
    )


def render_config(config: DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json object of a drafter, in the form that stock SGLang and z-lab DFlash read."""
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.length_head_width is not None:
        dflash |= {
            "use_thresh_head_two_model": True,
            "thresh_head_bottleneck_dim": config.length_head_width,
            "thresh_head_direct_len": config.length_head_is_direct,
        }
    rendered: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "block_size": config.block_size,
        "dflash_config": dflash,
    }
    if config.num_target_layers is not None:
        rendered["num_target_layers"] = config.num_target_layers
    return rendered


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _optional_integer(values: Mapping[str, Any], key: str) -> int | None:
    return None if values.get(key) is None else _integer(values, key)


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if not _is_integer(value):
        raise AdaSpecError(
            f"the drafter's config.json has {key} = {value!r}, but needs an integer; correct it."
        )
    return int(value)


def _positive(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise AdaSpecError(
            f"the drafter's config.json has {key} = {value!r}, but needs a positive number; "
            "correct it."
        )
    return float(value)


def _rope_theta(values: Mapping[str, Any]) -> float:
    """The RoPE base, from the flat key or transformers 5's ``rope_parameters``."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise AdaSpecError(
            f"the drafter's config.json describes RoPE as {scaling!r}, which is not an object; "
            "correct it."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise AdaSpecError(
            f"the drafter's config.json asks for RoPE scaling {kind!r}, which is not implemented; "
            "use a drafter with plain RoPE."
        )
    return _positive({**values, **scaling}, "rope_theta", 10_000.0)
