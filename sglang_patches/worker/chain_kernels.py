"""Triton kernels for chains that differ in length: each does in one launch what takes many.

A step of a small model is bound by the host, which launches tensor operations one by one; these are
what `RaggedGraphs.pack` and `make_verdict` do on the CPU. `tests/gpu/test_kernels.py` compares.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.verify.allocation import allocate
from adaspec.verify.allocation_kernel import power_bucket
from adaspec.verify.survival import DeviceSurvival, SurvivalModel

_PADDING_ROWS = 256  # written at a time


def warm_up(most_requests: int, block: int, device: torch.device) -> None:
    """Compile everything that batches of any size need: serving must not wait for it.

    Args:
        most_requests: that run at once.
        block: tokens of a draft block.
    """
    survival = DeviceSurvival(SurvivalModel(block - 1, has_confidence=True), device)
    for batch in sorted({power_bucket(n) for n in range(1, most_requests + 1)}):
        log_probs = torch.zeros((batch, block - 1), device=device)
        history, is_sampled = np.zeros(batch, dtype=np.float32), np.zeros(batch, dtype=np.bool_)
        survival.lengths(log_probs, history, is_sampled, 2 * batch)
        tokens = torch.zeros((batch, block), dtype=torch.int64, device=device)
        lengths = allocate(torch.ones((batch, block - 1), device=device), 2 * batch)
        for rows in (
            ChainRows.ragged(lengths, 2 * batch, block),
            ChainRows.uniform(batch, block, device),
        ):
            argmax = torch.zeros(rows.total, dtype=torch.int64, device=device)
            judge_greedy(tokens, argmax, rows)
            if rows.lengths is not None:
                pack_rows(rows, tokens, tokens, tokens, rows.total, batch)


class PackedRows(NamedTuple):
    """The rows of a pass; see `PackedChains`.

    Attributes:
        tokens: int64 ``[size]``; positions: int64 ``[size]``; slots: int64 ``[size]``.
        lengths: int32 ``[requests]``; boundaries: int32 ``[requests + 1]``, of the graph.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    boundaries: Tensor


def pack_rows(
    rows: ChainRows,
    tokens: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    size: int,
    requests: int,
) -> PackedRows:
    """Lay out chains of different lengths for a graph of ``size`` rows and so many ``requests``.

    Requests behind the batch share the padding, no more than ``block`` rows each; see
    ``RaggedVerifyLayout.padded_to_bucket`` with ``cap``.

    Args:
        tokens: int64 ``[batch, rows.width]``.
        positions, kv_slots: int64 ``[batch, block]``, contiguous.
    """
    block, device = positions.shape[1], tokens.device
    packed = torch.empty((3, size), dtype=torch.int64, device=device)
    lengths = torch.empty(requests, dtype=torch.int32, device=device)
    boundaries = torch.empty(requests + 1, dtype=torch.int32, device=device)
    assert rows.lengths is not None
    _pack_rows[(rows.batch + 1,)](
        rows.lengths,
        tokens,
        tokens.stride(0),
        positions,
        kv_slots,
        *packed.unbind(),
        lengths,
        boundaries,
        rows.batch,
        requests,
        size,
        block,
        REQUESTS=power_bucket(requests),
        COLUMNS=triton.next_power_of_2(block),
        PADDING=_PADDING_ROWS,
    )
    return PackedRows(*packed.unbind(), lengths, boundaries)


@triton.jit(do_not_specialize=["tokens_stride", "batch", "requests", "size", "block"])
def _pack_rows(
    chain_lengths_ptr,
    tokens_ptr,
    tokens_stride,
    positions_ptr,
    kv_slots_ptr,
    row_tokens_ptr,
    row_positions_ptr,
    row_slots_ptr,
    lengths_ptr,
    boundaries_ptr,
    batch,
    requests,
    size,
    block,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Programs below ``batch`` write a chain each; the last writes boundaries and padding."""
    chain = tl.program_id(0)
    request = tl.arange(0, REQUESTS)
    length = tl.load(chain_lengths_ptr + request, mask=request < batch, other=0).to(tl.int32)
    if chain < batch:
        start = tl.sum(tl.where(request < chain, length, 0), 0)
        own = tl.sum(tl.where(request == chain, length, 0), 0)
        column = tl.arange(0, COLUMNS)
        inside = column < own
        cell = chain * block + column
        token = tl.load(tokens_ptr + chain * tokens_stride + column, mask=inside)
        position = tl.load(positions_ptr + cell, mask=inside)
        kv_slot = tl.load(kv_slots_ptr + cell, mask=inside)
        tl.store(row_tokens_ptr + start + column, token, mask=inside)
        tl.store(row_positions_ptr + start + column, position, mask=inside)
        tl.store(row_slots_ptr + start + column, kv_slot, mask=inside)
    else:
        total = tl.sum(length, 0)
        left, empty = size - total, requests - batch
        each = left // tl.maximum(empty, 1)
        padding = each + tl.where(request - batch < left - each * empty, 1, 0)
        padded = tl.where(request < batch, length, padding)
        padded += tl.where((empty == 0) & (request == batch - 1), left, 0)
        padded = tl.minimum(padded, block)
        tl.store(lengths_ptr + request, padded, mask=request < requests)
        ends = tl.cumsum(tl.where(request < requests, padded, 0), 0)
        tl.store(boundaries_ptr, 0)
        tl.store(boundaries_ptr + 1 + request, ends, mask=request < requests)
        first_token, first_position = tl.load(tokens_ptr), tl.load(positions_ptr)
        for begin in range(total, size, PADDING):
            row = begin + tl.arange(0, PADDING)
            nothing = tl.zeros([PADDING], tl.int64)
            tl.store(row_tokens_ptr + row, nothing + first_token, mask=row < size)
            tl.store(row_positions_ptr + row, nothing + first_position, mask=row < size)
            tl.store(row_slots_ptr + row, nothing, mask=row < size)


def judge_greedy(tokens: Tensor, argmax: Tensor, rows: ChainRows) -> tuple[Tensor, Tensor, Tensor]:
    """`make_verdict` of `accept_greedy`.

    Args:
        tokens: int64 ``[batch, rows.width]``; argmax: int64 ``[rows]``, the target's.

    Returns:
        ``committed`` ``[batch, rows.width]``, ``commit_lens`` and ``bonus`` ``[batch]``; see
        `Verdict`.
    """
    batch, width, device = rows.batch, rows.width, tokens.device
    committed = torch.empty((batch, width), dtype=torch.int64, device=device)
    bonus = torch.empty(batch, dtype=torch.int64, device=device)
    commit_lens = torch.empty(batch, dtype=torch.int32, device=device)
    _judge_greedy[(batch,)](
        tokens,
        tokens.stride(0),
        argmax,
        argmax if rows.lengths is None else rows.lengths,
        committed,
        commit_lens,
        bonus,
        batch,
        width,
        CHAINS=power_bucket(batch),
        WIDTH=triton.next_power_of_2(width),
        RAGGED=rows.lengths is not None,
    )
    return committed, commit_lens, bonus


@triton.jit(do_not_specialize=["tokens_stride", "batch", "width"])
def _judge_greedy(
    tokens_ptr,
    tokens_stride,
    argmax_ptr,
    chain_lengths_ptr,
    committed_ptr,
    commit_lens_ptr,
    bonus_ptr,
    batch,
    width,
    CHAINS: tl.constexpr,
    WIDTH: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """One program for each chain."""
    chain = tl.program_id(0)
    start, own = chain * width, width
    if RAGGED:
        slot = tl.arange(0, CHAINS)
        length = tl.load(chain_lengths_ptr + slot, mask=slot < batch, other=0).to(tl.int32)
        start = tl.sum(tl.where(slot < chain, length, 0), 0)
        own = tl.sum(tl.where(slot == chain, length, 0), 0)
    column = tl.arange(0, WIDTH)
    has_draft = column + 1 < own
    draft = tl.load(tokens_ptr + chain * tokens_stride + column + 1, mask=has_draft, other=0)
    choice = tl.load(argmax_ptr + start + column, mask=column < own, other=0)
    # The last row of a chain has no draft behind it, so there is always a column that ends the run.
    accepted = tl.min(tl.where(has_draft & (draft == choice), WIDTH, column), 0)
    bonus = tl.sum(tl.where(column == accepted, choice, 0), 0)
    committed = tl.where(column == accepted, bonus, draft)
    tl.store(committed_ptr + chain * width + column, committed, mask=column < width)
    tl.store(commit_lens_ptr + chain, accepted + 1)
    tl.store(bonus_ptr + chain, bonus)
