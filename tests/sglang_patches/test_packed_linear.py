"""Packed linear layers compute the same product, and never that of an old weight."""

import pytest
import torch
from torch import nn

from sglang_patches.cpu.packed_linear import PackedLinearMethod, pack_linear_layers


class UnquantizedLinearMethod:
    """Named like SGLang's, since layers are recognised by the name of their method."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.processed = True


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=False).requires_grad_(False)
    layer.quant_method = UnquantizedLinearMethod()
    assert pack_linear_layers(layer) == 48 * 40 * 4
    return layer


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return layer.quant_method.apply(layer, x)


@pytest.mark.parametrize("shape", [(1, 48), (2, 48), (7, 48), (3, 5, 48)])
def test_the_product_is_that_of_the_plain_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    expected = x.double() @ layer.weight.double().T
    torch.testing.assert_close(product(layer, x).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_write_in_place_is_noticed(layer: nn.Module) -> None:
    x = torch.randn(4, 48)
    product(layer, x)
    with torch.inference_mode():
        layer.weight.copy_(torch.randn(40, 48))
    torch.testing.assert_close(product(layer, x), x @ layer.weight.T)


def test_an_announced_write_behind_the_version_counter_is_noticed(layer: nn.Module) -> None:
    x = torch.randn(4, 48)
    product(layer, x)
    layer.weight.data.copy_(torch.randn(40, 48))
    layer.quant_method.process_weights_after_loading(layer)
    torch.testing.assert_close(product(layer, x), x @ layer.weight.T)
    assert layer.processed


def test_only_float32_layers_without_quantisation_are_packed() -> None:
    narrow, other = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
    narrow.quant_method = UnquantizedLinearMethod()
    other.quant_method = object()
    assert pack_linear_layers(nn.ModuleList([narrow, other])) == 0
    assert not isinstance(narrow.quant_method, PackedLinearMethod)
