"""``python -m tests.server.spoiled_server``: a server in which drafting can be spoiled.

What is wrong with it is read from a file before every step: any of `WRONGS`, each on a line. The
alarm decides within a second instead of several.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.server.instrumented import launch, run_scheduler

WRONGS_VARIABLE = "ADASPEC_TEST_WRONGS"
TARGET, PREFIX = "other target weights", "other prefixes in the draft cache"
HEAD, DRAFTER = "rounded head", "rounded drafter"
WRONGS = (TARGET, PREFIX, HEAD, DRAFTER)


def run_spoiled_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    from sglang_patches.online import collapse

    collapse._PASSES, collapse._SECONDS = 96, 0.2
    run_scheduler(_spoiled, *args, **kwargs)


def _spoiled(base: type) -> type:
    class SpoiledWorker(base):  # type: ignore[misc]
        def __init__(self, *args: Any, target_worker: Any, **kwargs: Any) -> None:
            self.target_kept: dict[str, torch.Tensor] = {}
            if HEAD in _wrongs():
                _round(target_worker.model_runner.model.lm_head)
            super().__init__(*args, target_worker=target_worker, **kwargs)

        def init_cuda_graphs(self) -> None:
            if DRAFTER in _wrongs():
                for module in self.draft_model.modules():
                    if hasattr(module, "quant_method"):
                        _round(module)
                        module.quant_method = RoundedLinearMethod(module.quant_method)
            super().init_cuda_graphs()

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            wrongs = _wrongs()
            self.spoil_target(TARGET in wrongs)
            if PREFIX in wrongs and batch.forward_mode.is_extend():
                for row, prefix_len in zip(batch.req_pool_indices, batch.prefix_lens, strict=True):
                    slots = batch.req_to_token_pool.req_to_token[row, :prefix_len]
                    self.spoil_prefix(slots)
            return super().forward_batch_generation(batch, *args, **kwargs)

        @torch.no_grad()
        def spoil_target(self, wrong: bool) -> None:
            """As a trainer does that updates the target alone."""
            if wrong == bool(self.target_kept):
                return
            parameters = dict(self.model_runner.model.named_parameters())
            if wrong:
                self.target_kept = {name: p.clone() for name, p in parameters.items()}
                generator = torch.Generator().manual_seed(0)
                for p in parameters.values():
                    p.add_(0.2 * torch.randn(p.shape, generator=generator))
                return
            for name, kept in self.target_kept.items():
                parameters[name].copy_(kept)
            self.target_kept = {}

        @torch.no_grad()
        def spoil_prefix(self, slots: torch.Tensor) -> None:
            """As a cache does that brings the target's part of a prefix and not the drafter's."""
            pool = self.draft_model_runner.token_to_kv_pool
            for layer in range(pool.layer_num):
                for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                    rows = buffer[slots.long()]
                    buffer[slots.long()] = 3.0 * torch.randn_like(rows)

    return SpoiledWorker


class RoundedLinearMethod:
    """Stands for a method of quantisation, none of which runs on every CPU."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped_method = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped_method, name)


@torch.no_grad()
def _round(layer: nn.Module) -> None:
    """To -1, 0 and 1 times a scale for each row, in place."""
    weight = layer.weight
    scale = weight.abs().mean(dim=1, keepdim=True).clamp(min=1e-6)
    weight.copy_((weight / scale).round().clamp(-1, 1) * scale)


def _wrongs() -> list[str]:
    return Path(os.environ[WRONGS_VARIABLE]).read_text().splitlines()


if __name__ == "__main__":
    launch(run_spoiled_scheduler)
