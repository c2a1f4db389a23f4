"""Which drafted tokens are kept: the acceptance rules of speculative decoding, without an engine.

A draft chain is ``[anchor, d_1, .., d_n]``. One target pass over it gives, at row ``k``, the
target's distribution for the token after row ``k``. The accepted prefix plus one token of the
target's own (the bonus token) are committed.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaspec.chains import ChainRows

# Above this top-k a full sort is no dearer than torch.topk.
_LARGEST_PARTIAL_SORT = 1024
_NOTHING = -1  # no token


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

    def repeat(self, rows: ChainRows) -> "SamplingRules":
        """The rules of every row of a pass: tensors ``[rows]``."""
        return replace(
            self,
            temperature=rows.repeat(self.temperature),
            top_k=rows.repeat(self.top_k),
            top_p=rows.repeat(self.top_p),
            min_p=rows.repeat(self.min_p),
        )


def prefix_length(matches: Tensor) -> Tensor:
    """Length of the run of true values at the start of the last dimension: int64 ``[...]``."""
    return matches.long().cumprod(-1).sum(-1)


def accept_greedy(drafts: Tensor, target_tokens: Tensor, rows: ChainRows) -> Acceptance:
    """Greedy acceptance: keep drafts while they equal the target's argmax.

    Upstream: SGLang ``compute_dflash_correct_drafts_and_bonus``.

    Args:
        drafts: int64 ``[batch, n]``.
        target_tokens: int64 ``[rows]``, the target's argmax at the rows of the chains.
        rows: their layout, of width ``n + 1``.
    """
    target = rows.expand(target_tokens)  # [batch, n + 1]
    if drafts.shape[1] == 0:
        return Acceptance(drafts.new_zeros(len(drafts)), target[:, 0])
    accepted = prefix_length(_within(rows, drafts == target[:, :-1]))
    return Acceptance(accepted, target.gather(1, accepted[:, None]).squeeze(1))


def accept_sampled(
    drafts: Tensor, logits: Tensor, rules: SamplingRules, rows: ChainRows
) -> Acceptance:
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
        logits: ``[rows, vocab]``, penalties and masks already applied.
        rows: their layout, of width ``n + 1``.
    """
    is_greedy = rules.top_k == 1  # [batch]
    scaled = logits.float() / rows.repeat(rules.temperature)[:, None]
    argmax = scaled.argmax(-1)  # [rows]
    # What the drafter says at each column; nothing behind the last draft of a chain.
    verified = drafts if rows.is_verified is None else drafts.where(rows.is_verified, _NOTHING)
    drafted = nn.functional.pad(verified, (0, 1), value=_NOTHING)  # [batch, n + 1]
    if rules.is_filtered:
        weights, tokens = filtered_weights(scaled.softmax(-1), rules.repeat(rows))
    if drafts.shape[1] == 0:
        accepted = drafts.new_zeros(len(drafts))
    else:
        following = rows.pack(drafted)[:, None]  # [rows, 1]
        if rules.is_filtered:
            chance = (weights * (tokens == following)).sum(-1) / weights.sum(-1)
        else:
            chosen = scaled.gather(-1, following.clamp(min=0)).squeeze(-1)
            chance = (chosen - scaled.logsumexp(-1)).exp()  # [rows]
        coins = torch.rand(drafts.shape, device=drafts.device)
        agrees = drafts == rows.expand(argmax)[:, :-1]
        kept = torch.where(is_greedy[:, None], agrees, coins < rows.expand(chance)[:, :-1])
        accepted = prefix_length(_within(rows, kept))

    last = rows.start + accepted  # [batch], the row that decides the bonus token
    if rules.is_filtered:
        final_weights, final_tokens = weights[last], tokens[last]  # [batch, support]
    else:
        final_weights = scaled[last].softmax(-1)
        final_tokens = torch.arange(logits.shape[-1], device=drafts.device).expand_as(final_weights)
    refused = drafted.gather(1, accepted[:, None])  # [batch, 1]
    residual = final_weights.masked_fill(final_tokens == refused, 0.0)
    # Rounding can refuse a token that holds all the mass; then the target has no other.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, final_weights)
    bonus = final_tokens.gather(1, _race(residual)[:, None]).squeeze(1)
    return Acceptance(accepted, torch.where(is_greedy, argmax[last], bonus))


def _within(rows: ChainRows, kept: Tensor) -> Tensor:
    """``kept`` (bool ``[batch, n]``) for drafts that were verified, false for others."""
    return kept if rows.is_verified is None else kept & rows.is_verified


def filtered_weights(probs: Tensor, rules: SamplingRules) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p, in the order and with the ties of plain decoding.

    Upstream: SGLang ``top_k_top_p_min_p_sampling_from_probs_torch``: top-p looks at the mass before
    a token in the unfiltered distribution, min-p at the share of the most likely token.

    Args:
        probs: float32 ``[rows, vocab]``.
        rules: of each row.

    Returns:
        ``(weights, tokens)``, both ``[rows, support]`` in falling order; filtered tokens have
        weight 0 and the rest keep their probability (not renormalised).
    """
    if rules.largest_top_k <= min(_LARGEST_PARTIAL_SORT, probs.shape[-1]):
        weights, tokens = probs.topk(rules.largest_top_k, -1)
    else:
        weights, tokens = probs.sort(-1, descending=True)
    mass_before = weights.cumsum(-1) - weights
    ranks = torch.arange(weights.shape[-1], device=probs.device)
    keep = (ranks < rules.top_k[:, None]) & (mass_before <= rules.top_p[:, None])
    keep &= weights >= weights[:, :1] * rules.min_p[:, None]
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
