"""From target logits to a verdict: `adaspec.acceptance` on SGLang's sampling parameters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaspec.acceptance import Acceptance, SamplingRules, accept_greedy
from adaspec.chains import ChainRows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass(frozen=True)
class Verdict:
    """What a verify step commits.

    Attributes:
        committed: ``[batch, width]`` int64, accepted drafts, then the bonus; the rest is unused.
        commit_lens: ``[batch]`` int32, accepted drafts + 1.
        bonus: ``[batch]`` int64, the next anchor.
    """

    committed: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor


def make_verdict(tokens: torch.Tensor, acceptance: Acceptance) -> Verdict:
    """Assemble the committed tokens from the verified ``tokens`` (``[batch, width]``)."""
    accepted, bonus = acceptance
    if tokens.shape[1] == 1:  # plain decoding
        return Verdict(bonus[:, None], torch.ones_like(bonus, dtype=torch.int32), bonus)
    committed = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), dim=1)
    committed.scatter_(1, accepted[:, None], bonus[:, None])
    return Verdict(committed, accepted.to(torch.int32) + 1, bonus)


def greedy_verdict(
    tokens: torch.Tensor, argmax: torch.Tensor, rows: ChainRows, prefix_lens: torch.Tensor
) -> Verdict:
    """`make_verdict` of `accept_greedy`; on a GPU, equal chains are judged by one kernel.

    Args:
        tokens: int64 ``[batch, width]``; argmax: int64 ``[rows]``, the target's.
        prefix_lens: int64 ``[batch]``.
    """
    if not tokens.is_cuda or rows.lengths is not None or rows.width == 1:
        return make_verdict(tokens, accept_greedy(tokens[:, 1:], argmax, rows))
    return fused_verdict(tokens, argmax, rows, prefix_lens)


def fused_verdict(
    tokens: torch.Tensor, argmax: torch.Tensor, rows: ChainRows, prefix_lens: torch.Tensor
) -> Verdict:
    """Upstream's kernel of `greedy_verdict`, which DFLASH's greedy path uses."""
    from sglang.kernels.ops.speculative.dflash import _compute_dflash_accept_bonus_triton_unchecked

    candidates = tokens.contiguous()
    accepted, commit_lens = torch.empty(
        (2, rows.batch), dtype=torch.int32, device=tokens.device
    ).unbind()
    bonus, new_seq_lens = torch.empty(
        (2, rows.batch), dtype=torch.int64, device=tokens.device
    ).unbind()
    committed = torch.empty_like(candidates)
    _compute_dflash_accept_bonus_triton_unchecked(
        candidates=candidates,
        target_top1=rows.expand(argmax),
        accept_lens_out=accepted,
        commit_lens_out=commit_lens,
        bonus_ids_out=bonus,
        out_tokens_out=committed,
        prefix_lens=prefix_lens,
        new_seq_lens_out=new_seq_lens,
    )
    return Verdict(committed, commit_lens, bonus)


def sampling_rules(info: "SamplingBatchInfo", reqs: "list[Req]") -> SamplingRules:
    """SGLang's per-request sampling tensors, with what ``reqs`` already tells the host."""
    params = [req.sampling_params for req in reqs]
    return SamplingRules(
        temperature=info.temperatures.view(-1),
        top_k=info.top_ks,
        top_p=info.top_ps,
        min_p=info.min_ps,
        is_filtered=any(
            p.top_k != 1 and (p.top_k < req.vocab_size or p.top_p < 1 or p.min_p > 0)
            for p, req in zip(params, reqs, strict=True)
        ),
        largest_top_k=max(p.top_k for p in params),
    )
