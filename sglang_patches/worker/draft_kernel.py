"""Reading tokens and their log-probabilities off logits in one pass over them, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 2048  # logits of a row that are looked at together


def read_off(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, the first among equals, and its log-probability.

    Args:
        logits: ``[rows, vocab]``.

    Returns:
        int64 ``[rows]`` and float32 ``[rows]``.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _read_off[(rows,)](
        logits,
        logits.stride(0),
        tokens,
        log_probs,
        vocab,
        LANES=min(_LANES, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return tokens, log_probs


@triton.jit
def _read_off(logits_ptr, stride, tokens_ptr, log_probs_ptr, vocab, LANES: tl.constexpr):
    """One program for each row; every lane keeps a running maximum and sum (online softmax)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    logits_ptr += row * stride
    best = tl.load(logits_ptr + lane, mask=lane < vocab, other=-float("inf")).to(tl.float32)
    total = tl.where(lane < vocab, 1.0, 0.0)
    index = lane
    for begin in range(LANES, vocab, LANES):
        token = begin + lane
        x = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(best, x)
        total = total * tl.exp(best - higher) + tl.exp(x - higher)
        index = tl.where(x > best, token, index)
        best = higher
    highest = tl.max(best, 0)
    tl.store(tokens_ptr + row, tl.min(tl.where(best == highest, index, vocab), 0).to(tl.int64))
    tl.store(log_probs_ptr + row, -tl.log(tl.sum(total * tl.exp(best - highest), 0)))
