"""Matrix products of a few rows at the price of one: oneDNN weights in blocked layout.

A verify step multiplies a handful of rows by every weight. On row-major weights MKL's small-batch
kernels cost 2.6 times a single row at 8 rows; on weights that oneDNN has reordered once, 1.4 times
(``benchmarks/cpu_linear.py``). Plain decoding of several requests gains in the same way.
"""

from typing import Any

import torch
from torch import nn

# Reordered weights win from 2 rows up and lose nothing later; one row is a matrix-vector product,
# where the row-major kernel is best.
_FEWEST_PACKED_ROWS = 2
_BATCH_HINT = 8  # rows oneDNN lays the copy out for; 8, 16 and 64 measured alike


class PackedLinearMethod:
    """SGLang's quantisation method of a layer, with ``apply`` on a packed copy of its weight.

    The copy doubles the layer's memory. It is made again after a write that PyTorch's version
    counter shows or that SGLang announces: every weight update ends with
    ``DefaultModelLoader.postprocess_weights``, which calls `process_weights_after_loading`.
    Whoever writes through ``weight.data`` must call it too. Everything else is answered by the
    wrapped method.
    """

    def __init__(self, wrapped: Any, layer: nn.Module) -> None:
        self._wrapped = wrapped
        self._packed: torch.Tensor | None = None
        self._packed_from: tuple[int, int] | None = None  # (data pointer, version) of the weight
        self._packed_weight(layer.weight)  # now, so that KV sizing sees the memory it takes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Forget the packed copy: the weight has changed."""
        self._packed = self._packed_from = None
        if hasattr(self._wrapped, "process_weights_after_loading"):
            self._wrapped.process_weights_after_loading(layer)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[..., in]``; upstream ``UnquantizedLinearMethod``."""
        weight: torch.Tensor = layer.weight
        rows = x.numel() // x.shape[-1]
        if rows < _FEWEST_PACKED_ROWS or x.dtype != weight.dtype:
            return nn.functional.linear(x, weight, bias)
        packed = self._packed_weight(weight)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def _packed_weight(self, weight: torch.Tensor) -> torch.Tensor:
        source = (weight.data_ptr(), weight._version)
        if self._packed is None or source != self._packed_from:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _BATCH_HINT)
            self._packed_from = source
        return self._packed


def pack_linear_layers(model: nn.Module) -> int:
    """Give every unquantised float32 linear layer and head of ``model`` a `PackedLinearMethod`.

    Returns:
        Bytes that the packed copies take.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    extra_bytes = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if type(method).__name__ not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            continue
        if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32:
            continue
        module.quant_method = PackedLinearMethod(method, module)
        extra_bytes += weight.numel() * weight.element_size()
    return extra_bytes
