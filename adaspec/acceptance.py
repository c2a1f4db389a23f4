"""Which drafted tokens are kept: the acceptance rules of speculative decoding, without an engine.

A draft chain is ``[anchor, d_1, .., d_n]``. One target pass over it gives, at row ``k``, the
target's distribution for the token after row ``k``. The accepted prefix plus one token of the
target's own (the bonus token) are committed.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """Outcome of verifying draft chains.

    Attributes:
        accepted: int64 ``[batch]``, accepted drafts, 0 to n.
        bonus: int64 ``[batch]``, the target's token that follows the accepted prefix.
    """

    accepted: Tensor
    bonus: Tensor


def prefix_length(matches: Tensor) -> Tensor:
    """Length of the run of true values at the start of the last dimension: int64 ``[...]``."""
    return matches.long().cumprod(-1).sum(-1)


def accept_greedy(drafts: Tensor, target_tokens: Tensor) -> Acceptance:
    """Greedy acceptance: keep drafts while they equal the target's argmax.

    Upstream: SGLang ``compute_dflash_correct_drafts_and_bonus``.

    Args:
        drafts: int64 ``[batch, n]``.
        target_tokens: int64 ``[batch, n + 1]``, the target's argmax at the rows of the chain.
    """
    accepted = prefix_length(drafts == target_tokens[:, :-1])
    return Acceptance(accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1))


def accept_sampled(
    drafts: Tensor, target_probs: Tensor, coins: Tensor, final_coins: Tensor
) -> Acceptance:
    """Target-only chain sampling: the committed tokens are distributed as the target's samples.

    A draft ``d_k`` is accepted with probability ``q_k(d_k)``; on the first rejection the token is
    drawn from ``q_k`` without the rejected one, renormalised; after a fully accepted chain from the
    last row. The drafter is a point mass, so this is speculative sampling (arXiv 2211.17192) with
    ``p = 1[d_k]``: acceptance ``min(1, q/p) = q``, residual ``(q - p)+``, which is ``q`` with
    ``d_k`` struck out. Upstream: SGLang ``tree_speculative_sampling_target_only`` on a chain with
    zero draft probabilities and thresholds of 1.

    Args:
        drafts: int64 ``[batch, n]``.
        target_probs: float32 ``[batch, n + 1, vocab]``, after temperature and filters.
        coins: float32 ``[batch, n]``, uniform on [0, 1).
        final_coins: float32 ``[batch]``, uniform on [0, 1), for the bonus token.
    """
    chance = target_probs[:, :-1].gather(2, drafts[..., None]).squeeze(-1)  # [batch, n]
    accepted = prefix_length(coins < chance)
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    residual = target_probs[rows, accepted].clone()  # [batch, vocab]
    rejected = accepted < drafts.shape[1]
    refused = drafts[rows[rejected], accepted[rejected]]
    residual[rows[rejected], refused] = 0.0
    return Acceptance(accepted, _inverse_cdf(residual, final_coins))


def _inverse_cdf(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw one index a row from unnormalised weights ``[batch, vocab]``."""
    cumulative = weights.double().cumsum(-1)
    point = coins.double()[:, None] * cumulative[:, -1:]
    # `right` finds the first entry above the point, which never has zero weight.
    index = torch.searchsorted(cumulative, point, right=True).squeeze(1)
    last = (weights > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(index, last)


def walk_acceptance(accepted: Tensor, length: int) -> tuple[int, int]:
    """Simulate greedy speculative decoding of one known response.

    The first token comes from the prefill; then each target pass commits the accepted drafts and
    the bonus token, until the response is complete.

    Args:
        accepted: int64 ``[length - 1]``, drafts accepted when the anchor is token ``i``.
        length: tokens of the response, its end token included.

    Returns:
        ``(committed, passes)``; their quotient is the committed tokens per target pass.
    """
    steps = accepted.tolist()
    position = passes = 0
    while position < length - 1:
        position += steps[position] + 1
        passes += 1
    return length - 1, passes
