"""Allocation as one Triton kernel, survival included: tensor operations take ten launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_INFINITY = tl.constexpr(0x7F800000)  # its bits


def power_bucket(requests: int) -> int:
    """16, 64, 256, …: the next that holds so many requests; kernels are compiled for these only."""
    bucket = 16
    while bucket < requests:
        bucket *= 4
    return bucket


def allocate_in_one_launch(priority: Tensor, extra: int) -> Tensor:
    """Lengths int32 ``[batch]`` that take the ``extra`` drafts of highest priority.

    Args:
        priority: float32 ``[batch, drafts]`` on a CUDA device, not negative.
        extra: at most all drafts.
    """
    batch, drafts = priority.shape
    lengths = torch.empty(batch, dtype=torch.int32, device=priority.device)
    _allocate[(1,)](
        priority.contiguous(),
        lengths,
        batch,
        drafts,
        extra,
        **_compiled_for(batch, drafts),
    )
    return lengths


def allocate_by_confidence(
    log_probs: Tensor, base: Tensor, confidence: Tensor, least: float, extra: int
) -> Tensor:
    """`allocate_in_one_launch` by the survival that `DeviceSurvival` gives to these drafts.

    Args:
        log_probs: float32 ``[batch, drafts]`` on a CUDA device.
        base, confidence: float32 ``[batch or 1, drafts or more]``, the maps of acceptance.
        least: probability of a draft, below which (and as much below 1) confidence is cut.
        extra: at most all drafts.
    """
    batch, drafts = log_probs.shape
    lengths = torch.empty(batch, dtype=torch.int32, device=log_probs.device)
    _allocate_by_confidence[(1,)](
        log_probs,
        log_probs.stride(0),
        base,
        base.stride(0) if len(base) > 1 else 0,
        base.stride(1),
        confidence,
        confidence.stride(0) if len(confidence) > 1 else 0,
        confidence.stride(1),
        least,
        lengths,
        batch,
        drafts,
        extra,
        **_compiled_for(batch, drafts),
    )
    return lengths


def _compiled_for(batch: int, drafts: int) -> dict[str, int]:
    """Constants of both kernels: few, so that few are compiled."""
    return {
        "BATCH": power_bucket(batch),
        "DRAFTS": triton.next_power_of_2(drafts),
        "num_warps": 4 if batch <= 16 else 8,
    }


@triton.jit
def _highest(values, exists, extra):
    """Lengths ``[BATCH]`` that take the ``extra`` highest of ``[DRAFTS, BATCH]`` values.

    The ``extra``-th highest is found by bisection; among equals, the earlier are taken.
    """
    # Numbers that are not negative are ordered as their bits are.
    bits = tl.where(exists, values.to(tl.int32, bitcast=True), -1)
    low = tl.zeros([], tl.int32)
    high = tl.full([], _INFINITY, tl.int32)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        is_low = tl.sum(tl.sum((bits >= middle).to(tl.int32), 1), 0) >= extra
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle - 1)
    above = bits > low
    equal = ((bits == low) & exists).to(tl.int32)
    left = extra - tl.sum(tl.sum(above.to(tl.int32), 1), 0)
    of_position = tl.sum(equal, 1)
    rank = (tl.cumsum(of_position, 0) - of_position)[:, None] + tl.cumsum(equal, 1)
    chosen = above | ((equal == 1) & (rank <= left))
    return 1 + tl.sum(chosen.to(tl.int32), 0)


@triton.jit(do_not_specialize=["batch", "drafts", "extra"])
def _allocate(
    priority_ptr, lengths_ptr, batch, drafts, extra, BATCH: tl.constexpr, DRAFTS: tl.constexpr
):
    position = tl.arange(0, DRAFTS)[:, None]
    request = tl.arange(0, BATCH)[None, :]
    exists = (position < drafts) & (request < batch)
    values = tl.load(priority_ptr + request * drafts + position, mask=exists, other=0.0)
    where = tl.arange(0, BATCH)
    tl.store(lengths_ptr + where, _highest(values, exists, extra), mask=where < batch)


@triton.jit(
    do_not_specialize=[
        "log_probs_row", "base_row", "base_step", "confidence_row", "confidence_step", "least",
        "batch", "drafts", "extra",
    ]
)  # fmt: skip
def _allocate_by_confidence(
    log_probs_ptr,
    log_probs_row,
    base_ptr,
    base_row,
    base_step,
    confidence_ptr,
    confidence_row,
    confidence_step,
    least,
    lengths_ptr,
    batch,
    drafts,
    extra,
    BATCH: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    position = tl.arange(0, DRAFTS)[:, None]
    request = tl.arange(0, BATCH)[None, :]
    exists = (position < drafts) & (request < batch)
    log_prob = tl.load(log_probs_ptr + request * log_probs_row + position, mask=exists, other=0.0)
    base = tl.load(base_ptr + request * base_row + position * base_step, mask=exists, other=0.0)
    slope = tl.load(
        confidence_ptr + request * confidence_row + position * confidence_step,
        mask=exists,
        other=0.0,
    )
    p = tl.exp(log_prob)
    p = tl.where(p == p, p, 0.0)  # NaN is no confidence at all
    p = tl.minimum(tl.maximum(p, least), 1 - least)
    accepted = base + slope * tl.log(p / (1 - p))  # log odds
    log_accepted = tl.minimum(accepted, 0.0) - tl.log(1 + tl.exp(-tl.abs(accepted)))
    survival = tl.exp(tl.cumsum(log_accepted, 0))
    where = tl.arange(0, BATCH)
    tl.store(lengths_ptr + where, _highest(survival, exists, extra), mask=where < batch)
