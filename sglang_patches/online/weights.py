"""The served drafter's weights: the next version beside them, the last good one behind them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaspec.versions import is_context_weight

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

HEAD_PREFIX = "thresh_head_two_model."
_SAMPLED_ROWS = 64


class DraftWeights:
    """Sets of one draft model's weights on its device; what is served is written in place.

    Further sets are allocated at the start, so that the sizing of KV pools sees them. CUDA graphs
    have recorded the addresses of the served one.

    Args:
        model: SGLang's draft model (``DFlashDraftModel``), loaded.
        fused_helper: gives the worker's ``FusedKVMaterializeHelper``, or None where context K/V
            are projected layer by layer.
        head: the drafter's length head, which is no part of SGLang's draft model; None without.
    """

    def __init__(
        self,
        model: nn.Module,
        fused_helper: Callable[[], "FusedKVMaterializeHelper | None"],
        head: nn.Module | None = None,
    ) -> None:
        self._model = model
        self._fused_helper = fused_helper
        self._live = {name: p.detach() for name, p in model.named_parameters()}
        if head is not None:
            self._live |= {f"{HEAD_PREFIX}{n}": p.detach() for n, p in head.named_parameters()}
        self._staged = {name: p.clone() for name, p in self._live.items()}
        self._trusted = {name: p.clone() for name, p in self._live.items()}
        # For control windows, without the weights of the context: the frozen base, and the version
        # that is served between the windows.
        self._base: dict[str, Tensor] = {}
        self._parked: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where all sets are."""
        return next(iter(self._live.values())).device

    @property
    def nbytes(self) -> int:
        """Memory of the sets beside the served one."""
        sets = (self._staged, self._trusted, self._base, self._parked)
        return sum(tensor.nbytes for kept in sets for tensor in kept.values())

    @property
    def on_gpu(self) -> bool:
        """Whether copies run on a CUDA stream."""
        return all(p.is_cuda for p in self._live.values())

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a version's checkpoint tensors beside the live weights; any thread."""
        _load(self._model, self._staged, tensors)

    def hold_base(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the base's checkpoint tensors on the device; before anything is served.

        Parameters made of context weights alone are left out: control windows are run only where
        they are the base's. In ``qkv_proj`` the rows of K and V are rewritten with what they hold,
        so the fused K/V copies stay right.
        """
        self.stage(tensors)
        for name, staged in self._staged.items():
            if not is_context_weight(name):
                self._base[name] = staged.clone()
                self._parked[name] = self._live[name].clone()

    def draft_with_base(self) -> None:
        """Serve the base, from the next kernel of the current stream on."""
        self._write(self._base)

    def draft_with_live(self) -> None:
        """Serve the version that was installed last again."""
        self._write(self._parked)

    def restore_base(self) -> None:
        """Install the base; the live version's context weights must be the base's."""
        self._write(self._base)
        self._park(self._base)

    @torch.no_grad()
    def trust_live(self) -> None:
        """Make the live weights the ones that `restore` goes back to."""
        for name, live in self._live.items():
            self._trusted[name].copy_(live)

    def install_staged(self) -> None:
        """Serve what was staged, from the next kernel of the current stream on."""
        self._install(self._staged)

    def restore(self) -> None:
        """Serve the trusted weights again."""
        self._install(self._trusted)

    def differences(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of served weights that are not what a start from ``tensors`` would have loaded."""
        return [name for name, is_right in self.checks(tensors).items() if not is_right()]

    def checks(self, tensors: Mapping[str, Tensor]) -> dict[str, Callable[[], bool]]:
        """For each served weight, whether it is what a start from ``tensors`` would have loaded.

        Fused copies count, as ``fused K/V``. Loads a set of its own on the CPU; each check waits
        for the device.
        """
        expected = {name: live.to("cpu", copy=True) for name, live in self._live.items()}
        _load(self._model, expected, tensors)
        checks: dict[str, Callable[[], bool]] = {
            name: partial(same_bits, live, expected[name]) for name, live in self._live.items()
        }
        if self._fused_helper() is not None:
            checks["fused K/V"] = self._fused_copies_are_right
        return checks

    @torch.no_grad()
    def _fused_copies_are_right(self) -> bool:
        helper = self._fused_helper()
        return helper is None or all(
            torch.equal(copy, weight) for copy, weight in _fused_pairs(helper, self._model)
        )

    @torch.no_grad()
    def _install(self, source: Mapping[str, Tensor]) -> None:
        self._write(source)
        self._park(source)
        helper = self._fused_helper()
        if helper is not None:
            for copy, weight in _fused_pairs(helper, self._model):
                copy.copy_(weight, non_blocking=True)

    @torch.no_grad()
    def _write(self, source: Mapping[str, Tensor]) -> None:
        # copy_ on the parameter itself raises its version counter, by which the CPU platform's
        # packed layers notice that their copy is out of date (sglang_patches.cpu.packed_linear).
        for name, tensor in source.items():
            self._live[name].copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def _park(self, source: Mapping[str, Tensor]) -> None:
        for name, parked in self._parked.items():
            parked.copy_(source[name], non_blocking=True)


class _Destination:
    """A model whose ``load_weights`` writes into other tensors than its own parameters.

    The loader of the model itself decides which checkpoint tensor belongs where, so that a swap is
    a cold start bit for bit: it stacks q, k and v, gate and up, and takes this rank's shard. All it
    asks of the model is ``named_parameters`` and settings.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._model = model
        self._parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters over our tensors, with the attributes that weight loaders read."""
        for name, original in self._model.named_parameters():
            parameter = nn.Parameter(self._parameters[name], requires_grad=False)
            parameter.__dict__.update(original.__dict__)
            yield name, parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@torch.no_grad()
def _load(
    model: nn.Module, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    type(model).load_weights(_Destination(model, parameters), tensors.items())  # type: ignore[operator]
    for name, tensor in tensors.items():
        if name.startswith(HEAD_PREFIX) and name in parameters:
            parameters[name].copy_(tensor)


def _fused_pairs(
    helper: "FusedKVMaterializeHelper", model: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    """The helper's copies of weights (views of its buffers), each with the weight it stands for.

    Mirrors ``FusedKVMaterializeHelper.__init__``, which stacks the K/V rows of all layers once and
    is never told of an update.
    """
    width = helper.layer_out_dim
    for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
        attention = layer.self_attn
        rows = slice(attention.q_size, attention.q_size + 2 * attention.kv_size)
        copy = helper.flat_kv_weight_t[:, i * width : (i + 1) * width]  # [hidden, 2 · kv]
        yield copy, attention.qkv_proj.weight.detach()[rows].t()
        yield helper.k_norm_weights[i], attention.k_norm.weight.detach()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of contents across devices; NaN equals itself."""
    flat = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


@torch.no_grad()
def sampled_checksums(model: nn.Module) -> dict[str, int]:
    """Of every parameter, a checksum over evenly spaced rows; waits for the device."""
    return {name: _sampled_checksum(p.detach()) for name, p in model.named_parameters()}


def _sampled_checksum(parameter: Tensor) -> int:
    if parameter.numel() == 0:  # some quantised layers keep such placeholders
        return 0
    rows = parameter.reshape(parameter.shape[0] if parameter.dim() else 1, -1)
    step = max(1, rows.shape[0] // _SAMPLED_ROWS)
    return int(rows[::step].contiguous().view(torch.uint8).to(torch.int64).sum())
