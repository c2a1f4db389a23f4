"""Acceptance: how much of a verified block is committed, and the bonus token behind it.

Greedy requests accept the longest prefix that equals the target's argmax. Sampled requests use
target-only speculative sampling for a deterministic draft: a drafted token x is accepted with
probability p(x), and at the first rejection the bonus is drawn from p with x removed, which
leaves the target's distribution unchanged (Leviathan et al., 2023, with a one-hot q; upstream
``tree_speculative_sampling_target_only``).
"""

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# Above this top-k a full sort is no dearer than torch.topk.
_LARGEST_PARTIAL_SORT = 1024


@dataclass(frozen=True)
class Verdict:
    """What a verify step commits.

    Attributes:
        accept_lens: ``[batch]`` int32, accepted draft tokens (0 … width − 1).
        bonus: ``[batch]`` int64, the token the target itself adds; the next anchor.
        committed: ``[batch, width]`` int64, accepted tokens, then the bonus; the rest is unused.
        commit_lens: ``[batch]`` int32, ``accept_lens + 1``.
    """

    accept_lens: torch.Tensor
    bonus: torch.Tensor
    committed: torch.Tensor
    commit_lens: torch.Tensor


def make_verdict(tokens: torch.Tensor, accept_lens: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Assemble the committed tokens from ``tokens`` (``[batch, width]``, anchor first)."""
    accept_lens = accept_lens.to(torch.int32)
    committed = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), dim=1)
    committed.scatter_(1, accept_lens.to(torch.int64)[:, None], bonus[:, None])
    return Verdict(accept_lens, bonus, committed, accept_lens + 1)


def accept_greedy(tokens: torch.Tensor, argmax: torch.Tensor) -> Verdict:
    """Commit the longest drafted prefix that the target would have produced itself.

    Args:
        tokens: ``[batch, width]`` int64, anchor first.
        argmax: ``[batch, width]`` int64, the target's choice after each column.
    """
    matches = tokens[:, 1:] == argmax[:, :-1]
    accept_lens = matches.to(torch.int32).cumprod(dim=1).sum(dim=1)
    bonus = argmax.gather(1, accept_lens.to(torch.int64)[:, None]).squeeze(1)
    return make_verdict(tokens, accept_lens, bonus)


def accept_sampled(
    tokens: torch.Tensor, logits: torch.Tensor, info: SamplingBatchInfo, reqs: list[Req]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept by speculative sampling; rows with top-k 1 (temperature 0) are decided by argmax.

    Args:
        tokens: ``[batch, width]`` int64, anchor first.
        logits: ``[batch · width, vocab]``, penalties and masks already applied.
        info: SGLang's per-request sampling tensors; ``reqs`` gives the same values on the host.

    Returns:
        accept_lens ``[batch]`` int32 and bonus ``[batch]`` int64.
    """
    batch_size, width = tokens.shape
    rows = torch.arange(batch_size, device=tokens.device)
    scaled = logits.view(batch_size, width, -1).float() / info.temperatures[:, :, None]
    drafted = tokens[:, 1:]  # [batch, width − 1]
    is_greedy = info.top_ks == 1  # [batch]
    argmax = scaled.argmax(dim=-1)  # [batch, width]

    if any(_is_filtered(req) for req in reqs):
        weights, ids = filter_distribution(scaled.softmax(dim=-1), info, _max_top_k(reqs))
        drafted_prob = (weights[:, :-1] * (ids[:, :-1] == drafted[..., None])).sum(dim=-1)
        drafted_prob = drafted_prob / weights[:, :-1].sum(dim=-1)
    else:
        log_norm = scaled.logsumexp(dim=-1)  # [batch, width]
        drafted_logit = scaled[:, :-1].gather(-1, drafted[..., None]).squeeze(-1)
        drafted_prob = (drafted_logit - log_norm[:, :-1]).exp()
        weights, ids = None, None

    coins = torch.rand(drafted.shape, device=tokens.device)
    accepted = torch.where(is_greedy[:, None], drafted == argmax[:, :-1], coins < drafted_prob)
    accept_lens = accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)

    # One distribution per request, at its first rejected (or bonus) position: [batch, support].
    if weights is None or ids is None:
        final_weights = scaled[rows, accept_lens].softmax(dim=-1)
        final_ids = torch.arange(scaled.shape[-1], device=tokens.device).expand_as(final_weights)
    else:
        final_weights, final_ids = weights[rows, accept_lens], ids[rows, accept_lens]
    following = torch.cat((drafted, torch.full_like(tokens[:, :1], -1)), dim=1)
    rejected = following[rows, accept_lens]  # −1 where everything was accepted
    residual = final_weights.masked_fill(final_ids == rejected[:, None], 0.0)
    # Rounding can reject a token that holds all the mass; the target then has only that token.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, final_weights)
    # argmax of w / Exp(1) draws from w without a cumulative sum (torch.multinomial's own method).
    race = residual / torch.empty_like(residual).exponential_()
    bonus = final_ids.gather(1, race.argmax(dim=1, keepdim=True)).squeeze(1)
    bonus = torch.where(is_greedy, argmax[rows, accept_lens], bonus)
    return accept_lens.to(torch.int32), bonus


def filter_distribution(
    probs: torch.Tensor, info: SamplingBatchInfo, max_top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k, top-p and min-p as ``top_k_top_p_min_p_sampling_from_probs_torch`` applies them.

    Args:
        probs: ``[batch, width, vocab]`` float32.
        max_top_k: an upper bound of ``info.top_ks``, known on the host.

    Returns:
        weights ``[batch, width, support]`` (zero where filtered, not renormalised, sorted) and
        the token ids they belong to.
    """
    if max_top_k <= min(_LARGEST_PARTIAL_SORT, probs.shape[-1]):
        weights, ids = probs.topk(max_top_k, dim=-1)
    else:
        weights, ids = probs.sort(dim=-1, descending=True)
    mass_before = weights.cumsum(dim=-1) - weights
    ranks = torch.arange(weights.shape[-1], device=probs.device)
    keep = (ranks < info.top_ks[:, None, None]) & (mass_before <= info.top_ps[:, None, None])
    weights = weights * keep
    if info.need_min_p_sampling:
        weights = weights * (weights >= weights[..., :1] * info.min_ps[:, None, None])
    return weights, ids


def _is_filtered(request: Req) -> bool:
    params = request.sampling_params
    if params.top_k == 1:
        return False
    return params.top_k < request.vocab_size or params.top_p < 1 or params.min_p > 0


def _max_top_k(reqs: list[Req]) -> int:
    return max(request.sampling_params.top_k for request in reqs)
