"""Optimisers and their shared schedule."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from adaspec.training.config import OptimSection


def make_optimisers(model: nn.Module, config: OptimSection) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the weight matrices and AdamW for the rest.

    Norm weights are not decayed. Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix;
    with ``match_rms_adamw`` its step has AdamW's size, so that one learning rate serves both.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimisers: list[torch.optim.Optimizer] = []
    if config.name == "muon":
        optimisers.append(
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    else:
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(0.9, 0.95), fused=parameters[0].device.type == "cuda"
    )
    return [*optimisers, adamw]


def learning_rate(config: OptimSection, progress: float) -> float:
    """Warm-up then cosine.

    Args:
        progress: share of the run that is done, 0 to 1.
    """
    if progress < config.warmup_share:
        return config.lr * max(progress, 1e-3) / config.warmup_share
    share = (progress - config.warmup_share) / max(1.0 - config.warmup_share, 1e-9)
    floor = config.final_lr_share
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def set_learning_rate(optimisers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Set the rate of every parameter group."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = lr
