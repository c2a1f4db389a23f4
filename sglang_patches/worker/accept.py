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


def greedy_verdict(tokens: torch.Tensor, argmax: torch.Tensor, rows: ChainRows) -> Verdict:
    """`make_verdict` of `accept_greedy`; on a GPU one kernel.

    Args:
        tokens: int64 ``[batch, width]``; argmax: int64 ``[rows]``, the target's.
    """
    if tokens.is_cuda and rows.width > 1:
        from sglang_patches.worker.chain_kernels import judge_greedy

        return Verdict(*judge_greedy(tokens, argmax, rows))
    return make_verdict(tokens, accept_greedy(tokens[:, 1:], argmax, rows))


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
