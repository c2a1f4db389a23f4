"""A swap in place equals a cold start, in every parameter and in every copy made of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaspec.drafters.heads import LengthHead
from sglang_patches.online.weights import DraftWeights, same_bits, sampled_checksums
from tests.sglang_patches.online.conftest import changed


@pytest.fixture
def helper(model: nn.Module) -> Any:
    """Upstream's fused K/V projection, built once, as the worker does on a GPU."""
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

    attention = model.layers[0].self_attn
    return FusedKVMaterializeHelper(
        list(model.layers),
        attention.rotary_emb,
        attention.num_kv_heads,
        attention.head_dim,
        torch.device("cpu"),
    )


@pytest.fixture
def weights(model: nn.Module, helper: Any) -> DraftWeights:
    return DraftWeights(model, lambda: helper)


def cold_start(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    fresh = type(model)(model.config)
    fresh.load_weights(tensors.items())
    return fresh


def install(weights: DraftWeights, tensors: dict[str, Tensor]) -> None:
    weights.stage(tensors)
    with torch.inference_mode():
        weights.install_staged()


def test_a_swap_equals_a_cold_start(
    model: nn.Module, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    version = changed(tensors, seed=1)
    addresses = [p.data_ptr() for p in model.parameters()]
    install(weights, version)
    fresh = dict(cold_start(model, version).named_parameters())
    assert {n for n, p in model.named_parameters() if not same_bits(p, fresh[n])} == set()
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_the_fused_projection_follows_at_its_old_addresses(
    model: nn.Module, weights: DraftWeights, helper: Any, tensors: dict[str, Tensor]
) -> None:
    buffers = (helper.flat_kv_weight_t, helper.k_norm_weights)
    addresses = [buffer.data_ptr() for buffer in buffers]
    version = changed(tensors, seed=1)
    install(weights, version)
    fresh = cold_start(model, version)
    rebuilt = type(helper)(
        list(fresh.layers),
        helper.rotary_emb,
        helper.num_kv_heads,
        helper.head_dim,
        torch.device("cpu"),
    )
    assert torch.equal(helper.flat_kv_weight_t, rebuilt.flat_kv_weight_t)
    assert torch.equal(helper.k_norm_weights, rebuilt.k_norm_weights)
    assert [buffer.data_ptr() for buffer in buffers] == addresses


def test_packed_copies_follow(
    model: nn.Module, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    layer = model.layers[0].self_attn.qkv_proj
    x = torch.randn(5, layer.weight.shape[1])
    with torch.inference_mode():
        before = layer.quant_method.apply(layer, x)
        install(weights, changed(tensors, seed=1))
        after = layer.quant_method.apply(layer, x)
    torch.testing.assert_close(after, x @ layer.weight.T)
    assert not torch.allclose(after, before)


def test_the_length_head_is_swapped_with_the_rest(
    model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    head = LengthHead(model.config.hidden_size, 8)
    weights = DraftWeights(model, lambda: None, head)
    versions = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh = LengthHead(model.config.hidden_size, 8).state_dict()
        named = {f"thresh_head_two_model.{name}": value for name, value in fresh.items()}
        versions.append(changed(tensors, seed=seed) | named)
    first, second = versions
    install(weights, first)
    weights.trust_live()
    install(weights, second)
    assert weights.differences(second) == []
    served = {f"thresh_head_two_model.{name}": p for name, p in head.named_parameters()}
    assert all(torch.equal(p, second[name]) for name, p in served.items())
    weights.restore()
    assert weights.differences(first) == []
    assert set(weights.differences(second)) >= set(served)


def test_the_trusted_weights_come_back(
    weights: DraftWeights, helper: Any, tensors: dict[str, Tensor]
) -> None:
    first, second = changed(tensors, seed=1), changed(tensors, seed=2)
    install(weights, first)
    weights.trust_live()
    install(weights, second)
    assert weights.differences(second) == []
    weights.restore()
    assert weights.differences(first) == []


def test_staging_leaves_the_served_weights_alone(
    weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    weights.stage(changed(tensors, seed=1))
    assert weights.differences(tensors) == []


@pytest.mark.parametrize(
    ("changed_name", "reported"),
    [
        ("up_proj", ["layers.0.mlp.gate_up_proj.weight"]),
        ("hidden_norm", ["hidden_norm.weight"]),
        ("v_proj", ["layers.0.self_attn.qkv_proj.weight"]),
    ],
)
def test_a_difference_is_named(
    weights: DraftWeights, tensors: dict[str, Tensor], changed_name: str, reported: list[str]
) -> None:
    assert weights.differences(changed(tensors, seed=1, only=changed_name)) == reported


def test_a_stale_fused_projection_is_named(
    model: nn.Module, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    version = changed(tensors, seed=1)
    model.load_weights(version.items())  # as upstream's update does
    assert weights.differences(version) == ["fused K/V"]


def test_the_checksum_notices_a_change_of_any_parameter(model: nn.Module) -> None:
    before = sampled_checksums(model)
    assert sampled_checksums(model) == before
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(1.5)
        assert sampled_checksums(model) != before
        with torch.no_grad():
            parameter.div_(1.5)


def test_the_checksum_passes_over_empty_parameters(model: nn.Module) -> None:
    model.g_idx = nn.Parameter(torch.empty(0), requires_grad=False)  # as GPTQ layers have
    before = sampled_checksums(model)
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    assert sampled_checksums(model) != before


def test_the_memory_of_further_sets_is_known(model: nn.Module, weights: DraftWeights) -> None:
    assert weights.nbytes == 2 * sum(p.nbytes for p in model.parameters())
    assert weights.device == torch.device("cpu")
