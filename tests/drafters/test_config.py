"""A drafter's config.json: what is read, what is refused, and that writing it loses nothing."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec.drafters.config import (
    DrafterConfig,
    evenly_spaced_layers,
    parse_config,
    render_config,
)
from adaspec.errors import AdaSpecError
from tests.versions.tiny import TINY

LENGTH_HEAD = {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 12}


def raw_config(**changes: object) -> dict[str, Any]:
    return render_config(TINY) | changes


def without(*keys: str) -> dict[str, Any]:
    """A good configuration that lacks these keys, at the top level and in `dflash_config`."""
    raw = raw_config()
    for key in keys:
        raw["dflash_config"].pop(key, None)
    return {key: value for key, value in raw.items() if key not in keys}


def test_writing_and_reading_gives_the_same_configuration() -> None:
    for config in (TINY, parse_config(raw_config(**LENGTH_HEAD, thresh_head_direct_len=True))):
        assert parse_config(render_config(config)) == config


def test_keys_may_stand_at_the_top_level_or_nested() -> None:
    raw = raw_config()
    flat = {**raw, **raw["dflash_config"]}
    del flat["dflash_config"]
    assert parse_config(flat) == TINY
    nested = {**raw, "dflash_config": {**raw["dflash_config"], "block_size": 7}}
    assert parse_config(nested).block_size == 7  # as SGLang reads it: the nested value wins


def test_what_is_left_out_has_the_published_defaults() -> None:
    raw = without("block_size", "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps")
    config = parse_config(raw)
    assert (config.block_size, config.head_dim, config.num_key_value_heads) == (16, 8, 2)
    assert (config.rope_theta, config.rms_norm_eps) == (10_000.0, 1e-6)


def test_default_taps_are_those_of_the_published_drafters() -> None:
    assert evenly_spaced_layers(36, 5) == (1, 9, 17, 25, 33)  # z-lab/Qwen3-8B-DFlash-b16
    assert evenly_spaced_layers(4, 1) == (2,)
    raw = raw_config(num_hidden_layers=5, layer_types=None, num_target_layers=36)
    del raw["dflash_config"]["target_layer_ids"]
    assert parse_config(raw).target_layer_ids == (1, 9, 17, 25, 33)


def test_rope_base_is_read_in_the_form_of_transformers_5() -> None:
    raw = raw_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert parse_config(raw).rope_theta == 5e5


def test_the_length_head_is_on_only_where_the_checkpoint_has_it() -> None:
    assert parse_config(raw_config()).length_head_width is None
    with_head = parse_config(raw_config(**LENGTH_HEAD))
    assert with_head.length_head_width == 12
    assert not with_head.length_head_is_direct


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_kernel_size", 4),
        ("selector_rank", 8),
        ("projector_type", "mlp"),
        ("final_logit_softcapping", 30.0),
        ("attention_bias", True),
        ("is_causal", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("use_prob_head", True),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_a_part_we_do_not_have_is_refused_by_name(key: str, value: object) -> None:
    name = "RoPE" if key == "rope_scaling" else key
    with pytest.raises(AdaSpecError, match=name):
        parse_config(raw_config(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 1),
        ("block_size", "16"),
        ("block_size", True),
        ("hidden_size", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_target_layers", "many"),
        ("head_dim", 7),
        ("mask_token_id", 40),
        ("mask_token_id", -1),
        ("target_layer_ids", []),
        ("target_layer_ids", [0, "1"]),
        ("target_layer_ids", [0, 3]),  # the output of the last layer cannot be tapped
        ("rms_norm_eps", "small"),
        ("rope_theta", float("nan")),
    ],
)
def test_an_impossible_value_is_refused_by_name(key: str, value: object) -> None:
    raw = without(key)
    raw[key] = value
    with pytest.raises(AdaSpecError, match=key):
        parse_config(raw)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "mask_token_id"])
def test_a_missing_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdaSpecError, match=key):
        parse_config(without(key))


def test_taps_need_the_target_they_are_spread_over() -> None:
    with pytest.raises(AdaSpecError, match="target_layer_ids"):
        parse_config(without("target_layer_ids", "num_target_layers"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(key=st.sampled_from([*render_config(TINY), "target_layer_ids", "rope_scaling"]), value=JSON)
def test_damage_gives_a_configuration_or_a_sentence(key: str, value: object) -> None:
    raw = without(key)
    raw[key] = value
    with suppress(AdaSpecError):
        assert isinstance(parse_config(raw), DrafterConfig)
