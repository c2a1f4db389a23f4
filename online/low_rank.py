"""Low-rank deltas: matrices in training as ``W + B A`` with W fixed (LoRA, arXiv 2106.09685)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class LowRank(nn.Module):
    """Adds ``outer @ inner`` to a matrix; nothing until it is trained.

    Attributes:
        inner: float32 ``[rank, in]``, random.
        outer: float32 ``[out, rank]``, zero at first.
    """

    def __init__(self, shape: torch.Size, rank: int, device: torch.device) -> None:
        super().__init__()
        out, into = shape
        self.inner = nn.Parameter(torch.randn(rank, into, device=device) / into**0.5)
        self.outer = nn.Parameter(torch.zeros(out, rank, device=device))

    def forward(self, matrix: Tensor) -> Tensor:
        """The matrix with its delta."""
        return matrix + self.outer @ self.inner


def attach(model: nn.Module, names: Iterable[str], rank: int) -> list[str]:
    """Give the named matrices a delta and freeze them; the names of the deltas' parameters."""
    made: list[str] = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        weight = getattr(module, attribute)
        delta = LowRank(weight.shape, min(rank, *weight.shape), weight.device)
        parametrize.register_parametrization(module, attribute, delta)
        original(model, name).requires_grad_(False)
        place = f"{path}.parametrizations.{attribute}.0"
        made += [f"{place}.inner", f"{place}.outer"]
    return made


def original(model: nn.Module, name: str) -> Tensor:
    """The parameter behind a name, without its delta."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if parametrize.is_parametrized(module, attribute):
        originals: Tensor = module.parametrizations[attribute].original  # type: ignore[union-attr, index]
        return originals
    found: Tensor = getattr(module, attribute)
    return found


def effective(model: nn.Module, name: str) -> Tensor:
    """The weight a forward pass uses: the parameter, with its delta if it has one."""
    path, _, attribute = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), attribute)
    return found.detach()


@torch.no_grad()
def clear(model: nn.Module) -> None:
    """Set every delta to zero."""
    for module in model.modules():
        if isinstance(module, LowRank):
            module.outer.zero_()
