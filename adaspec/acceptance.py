"""Which drafted tokens are kept: the acceptance rules of speculative decoding, without an engine.

A draft chain is ``[anchor, d_1, .., d_n]``. One target pass over it gives, at row ``k``, the
target's distribution for the token after row ``k``. The accepted prefix plus one token of the
target's own (the bonus token) are committed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Above this top-k a full sort is no dearer than torch.topk.
_LARGEST_PARTIAL_SORT = 1024


class Acceptance(NamedTuple):
    """Outcome of verifying draft chains.

    Attributes:
        accepted: int64 ``[batch]``, accepted drafts, 0 to n.
        bonus: int64 ``[batch]``, the target's token that follows the accepted prefix.
    """

    accepted: Tensor
    bonus: Tensor


@dataclass(frozen=True)
class SamplingRules:
    """How the requests of a batch want to be sampled. All tensors are ``[batch]``.

    Attributes:
        temperature: float32, above 0 (1 for greedy rows).
        top_k: integers; 1 makes a row greedy, a value of at least the vocabulary keeps everything.
        top_p: float32 in (0, 1]; ``min_p``: float32 in [0, 1).
        is_filtered: whether any row that is not greedy uses top-k, top-p or min-p.
        largest_top_k: the maximum of ``top_k``; known on the host so that nothing waits for it.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_filtered: bool
    largest_top_k: int


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


def accept_sampled(drafts: Tensor, logits: Tensor, rules: SamplingRules) -> Acceptance:
    """Target-only chain sampling: the committed tokens are distributed as the target's samples.

    A draft ``d_k`` is accepted with probability ``p_k(d_k)``; on the first rejection the token is
    drawn from ``p_k`` without the rejected one, renormalised; after a fully accepted chain from the
    last row. The drafter is a point mass, so this is speculative sampling (arXiv 2211.17192) with
    ``q = 1[d_k]``: acceptance ``min(1, p/q) = p``, residual ``(p - q)+``, which is ``p`` with
    ``d_k`` struck out. Upstream: SGLang ``tree_speculative_sampling_target_only`` on a chain with
    zero draft probabilities and thresholds of 1. Greedy rows are decided by argmax.

    Without filters no probability but the drafted tokens' is normalised over the whole chain; only
    one row per request is turned into a distribution. Draws from the device's default generator.

    Args:
        drafts: int64 ``[batch, n]``.
        logits: ``[batch, n + 1, vocab]``, penalties and masks already applied.
    """
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    is_greedy = rules.top_k == 1  # [batch]
    scaled = logits.float() / rules.temperature[:, None, None]
    argmax = scaled.argmax(-1)  # [batch, n + 1]
    if rules.is_filtered:
        weights, tokens = filtered_weights(scaled.softmax(-1), rules)  # [batch, n + 1, support]
        chance = (weights[:, :-1] * (tokens[:, :-1] == drafts[..., None])).sum(-1)
        chance = chance / weights[:, :-1].sum(-1)
    else:
        drafted = scaled[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
        chance = (drafted - scaled[:, :-1].logsumexp(-1)).exp()  # [batch, n]
    coins = torch.rand(drafts.shape, device=drafts.device)
    kept = torch.where(is_greedy[:, None], drafts == argmax[:, :-1], coins < chance)
    accepted = prefix_length(kept)

    if rules.is_filtered:
        final_weights, final_tokens = weights[rows, accepted], tokens[rows, accepted]
    else:
        final_weights = scaled[rows, accepted].softmax(-1)  # [batch, support]
        final_tokens = torch.arange(logits.shape[-1], device=drafts.device).expand_as(final_weights)
    nothing = drafts.new_full((drafts.shape[0], 1), -1)
    refused = torch.cat([drafts, nothing], 1)[rows, accepted]
    residual = final_weights.masked_fill(final_tokens == refused[:, None], 0.0)
    # Rounding can refuse a token that holds all the mass; then the target has no other.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, final_weights)
    bonus = final_tokens.gather(1, _race(residual)[:, None]).squeeze(1)
    return Acceptance(accepted, torch.where(is_greedy, argmax[rows, accepted], bonus))


def filtered_weights(probs: Tensor, rules: SamplingRules) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p, in the order and with the ties of plain decoding.

    Upstream: SGLang ``top_k_top_p_min_p_sampling_from_probs_torch``: top-p looks at the mass before
    a token in the unfiltered distribution, min-p at the share of the most likely token.

    Args:
        probs: float32 ``[batch, n, vocab]``.

    Returns:
        ``(weights, tokens)``, both ``[batch, n, support]`` in falling order; filtered tokens have
        weight 0 and the rest keep their probability (not renormalised).
    """
    if rules.largest_top_k <= min(_LARGEST_PARTIAL_SORT, probs.shape[-1]):
        weights, tokens = probs.topk(rules.largest_top_k, -1)
    else:
        weights, tokens = probs.sort(-1, descending=True)
    mass_before = weights.cumsum(-1) - weights
    ranks = torch.arange(weights.shape[-1], device=probs.device)
    keep = (ranks < rules.top_k[:, None, None]) & (mass_before <= rules.top_p[:, None, None])
    keep &= weights >= weights[..., :1] * rules.min_p[:, None, None]
    return weights * keep, tokens


def _race(weights: Tensor) -> Tensor:
    """One index a row with probability proportional to ``weights`` ``[batch, support]``.

    The smallest of independent exponentials with these rates; unlike an inverse CDF it needs no
    cumulative sum, whose float32 rounding would favour some tokens of a large vocabulary.
    """
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


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
