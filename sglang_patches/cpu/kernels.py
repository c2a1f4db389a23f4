"""PyTorch versions of the Triton and CUDA kernels on the serving path."""

import torch


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated KV slots into the request table, in place.

    Same contract as ``sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func``.

    Args:
        req_pool_indices: Row of each request in the table, ``[batch]`` integer.
        req_to_token: Slot table, ``[requests, context]`` int32, written.
        start_offset: First position to write, ``[batch]`` integer.
        end_offset: One past the last position to write, ``[batch]`` integer.
        out_cache_loc: Slots, requests one after the other, ``[sum(end - start)]`` integer.
        batch_size: Number of requests.
    """
    slots = out_cache_loc.to(req_to_token.dtype)
    rows = req_pool_indices[:batch_size].tolist()
    starts, ends = start_offset.tolist(), end_offset.tolist()
    cursor = 0
    for row, start, end in zip(rows, starts, ends, strict=False):
        count = end - start
        req_to_token[row, start:end] = slots[cursor : cursor + count]
        cursor += count


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """KV slots of positions ``start .. end`` of every request, one request after the other.

    Same contract as ``sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func``:
    requests may differ in ``end - start``, and the result has room for ``draft_token_num`` slots
    per request; what a shorter span leaves unused stays at its end, zero.

    Returns:
        Slots, ``[batch_size * draft_token_num]`` int64.
    """
    # [batch, draft_token_num]
    steps = torch.arange(draft_token_num)
    positions = start_offset.long()[:, None] + steps
    live = positions < end_offset.long()[:, None]
    positions.clamp_(max=req_to_token.shape[1] - 1)
    slots = req_to_token[req_pool_indices.long()[:, None], positions].long()
    if bool(live.all()):
        return slots.reshape(-1)
    packed = torch.zeros(batch_size * draft_token_num, dtype=torch.int64)
    kept = slots[live]
    packed[: kept.numel()] = kept
    return packed


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify one linear chain per request against the target's distribution, in place.

    Chain case of the CUDA op ``tree_speculative_sampling_target_only`` (argument names are
    upstream's): the draft is a point mass, so draft token x at step i is kept when
    ``u_i < p_i(x) / threshold_acc`` or ``p_i(x) >= threshold_single``; at the first rejection the
    bonus token is drawn from p_i without x, renormalised (Leviathan et al. 2023, algorithm 1, for
    a deterministic draft); after a full block it is drawn from the last p.

    Args:
        predicts: Output, committed tokens, flat ``[batch * block]`` int32.
        accept_index: Output, flat positions of the accepted chain, ``[batch, block]`` int32, -1
            behind the accepted prefix.
        accept_token_num: Output, accepted drafts, ``[batch]`` int32.
        candidates: Anchor and drafts, ``[batch, block]`` int64.
        uniform_samples: Acceptance draws in [0, 1), ``[batch, block]`` float32.
        uniform_samples_for_final_sampling: Bonus draws in [0, 1), ``[batch]`` float32.
        target_probs: Target distribution after each position, ``[batch, block, vocab]`` float32.
        threshold_single: Accept outright at this target probability; 1.0 keeps it lossless.
        threshold_acc: Divides the target probability; 1.0 keeps it lossless.
    """
    del retrive_index, retrive_next_token, retrive_next_sibling, draft_probs, deterministic
    batch, block = candidates.shape
    rows = torch.arange(batch)
    drafts = candidates[:, 1:]  # [batch, block - 1]
    p = target_probs[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)  # [batch, block - 1]
    # u < p and not <=: a draw of exactly 0 must not accept a token of probability 0.
    accepted = (uniform_samples[:, : block - 1] < p / threshold_acc) | (p >= threshold_single)
    length = accepted.int().cumprod(1).sum(1)  # [batch]

    bonus_probs = target_probs[rows, length].clone()  # [batch, vocab]
    rejected = length < block - 1
    bonus_probs[rows[rejected], drafts[rows[rejected], length[rejected]]] = 0.0
    cdf = bonus_probs.double().cumsum(-1)
    draw = uniform_samples_for_final_sampling.double()[:, None] * cdf[:, -1:]
    bonus = (cdf > draw).int().argmax(-1)
    # A p(x) that is 1 but for rounding leaves no mass behind x: then x itself is the draw.
    certain = cdf[:, -1] == 0
    bonus[certain] = candidates[certain, length[certain] + 1]

    columns = torch.arange(block)
    flat = rows[:, None] * block + columns
    chain = torch.where(columns <= length[:, None], flat, -1)
    accept_index[:batch, :block] = chain.to(accept_index.dtype)
    accept_token_num[:batch] = length.to(accept_token_num.dtype)
    tokens = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)
    tokens[rows, length] = bonus
    predicts[: batch * block] = tokens.reshape(-1).to(predicts.dtype)
