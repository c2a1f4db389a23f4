"""`adaspec.verify.allocation.allocate` as one Triton kernel: a sort takes several launches."""

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
        BATCH=power_bucket(batch),
        DRAFTS=triton.next_power_of_2(drafts),
        num_warps=4 if batch <= 16 else 8,
    )
    return lengths


@triton.jit(do_not_specialize=["batch", "drafts", "extra"])
def _allocate(
    priority_ptr, lengths_ptr, batch, drafts, extra, BATCH: tl.constexpr, DRAFTS: tl.constexpr
):
    """Finds the ``extra``-th highest value by bisection; among equals, the earlier are taken."""
    position = tl.arange(0, DRAFTS)[:, None]
    request = tl.arange(0, BATCH)[None, :]
    exists = (position < drafts) & (request < batch)
    values = tl.load(priority_ptr + request * drafts + position, mask=exists, other=0.0)
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
    lengths = 1 + tl.sum(chosen.to(tl.int32), 0)
    where = tl.arange(0, BATCH)
    tl.store(lengths_ptr + where, lengths, mask=where < batch)
