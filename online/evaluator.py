"""Walks of published and candidate versions, each computed once."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.network import BlockDrafter
from online.shadow import Walk, walk
from online.target import TargetMatrices
from online.trajectory import Trajectory


class Evaluator:
    """Replays trajectories with the weights exactly as they are published.

    Args:
        passes, max_context: see `walk`.
    """

    def __init__(
        self, config: DrafterConfig, target: TargetMatrices, passes: int, max_context: int
    ) -> None:
        self._target = target
        self._passes = passes
        self._max_context = max_context
        device = target.embedding.device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._drafter = BlockDrafter(config).to(device, self._dtype).requires_grad_(False)
        self._known: dict[tuple[int, str], Walk] = {}

    def candidate(
        self, tensors: Mapping[str, Tensor], trajectories: Sequence[Trajectory]
    ) -> list[Walk]:
        """Walks of weights that have no version number."""
        # Values are rounded as the published types round them, whatever the computing type is.
        self._drafter.load_state_dict(dict(tensors))
        return walk(self._drafter, self._target, trajectories, self._passes, self._max_context)

    def version(
        self, number: int, tensors: Mapping[str, Tensor], trajectories: Sequence[Trajectory]
    ) -> list[Walk]:
        """Walks of a published version; only trajectories not seen before are replayed."""
        new = [t for t in trajectories if (number, t.request) not in self._known]
        if new:
            walks = self.candidate(tensors, new)
            self._known |= {(number, t.request): w for t, w in zip(new, walks, strict=True)}
        return [self._known[number, t.request] for t in trajectories]

    def forget(self, numbers: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
        """Keep the walks of these versions on these trajectories only."""
        requests = {t.request for t in trajectories}
        self._known = {
            (number, request): result
            for (number, request), result in self._known.items()
            if number in numbers and request in requests
        }
