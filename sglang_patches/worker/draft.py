"""Drafting: one pass of the draft model over [anchor, MASK × (block − 1)] for every request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from adaspec.verify import DraftSignals
from sglang_patches.worker.draft_sampler import ConfidentDraftSampler

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    from sglang_patches.worker.worker import AdaSpecWorker


@dataclass(frozen=True)
class BlockWindow:
    """Where this step's draft block sits, for every request of the batch.

    Attributes:
        ids: ``[batch, block]`` int64, the anchor followed by mask tokens.
        positions: ``[batch, block]`` int64, absolute positions; column 0 is the committed length.
        slots: ``[batch, block]`` int64, KV slots reserved for these positions.
        kv_plan: SGLang's plan of those slots, shared by the draft, the verify and the KV writes.
        prefix_lens: ``[batch]`` int64, committed tokens with target KV (the anchor has none yet).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_plan: KVLocPlan
    prefix_lens: torch.Tensor


@dataclass(frozen=True)
class Proposal:
    """What the draft pass proposes.

    Attributes:
        tokens: ``[batch, drafts + 1]`` int64, the anchor and the drafted tokens.
        signals: what the policy of the verify length reads.
    """

    tokens: torch.Tensor
    signals: DraftSignals


def open_window(
    worker: "AdaSpecWorker", batch: ScheduleBatch, draft_input: DFlashDraftInputV2, block: int
) -> BlockWindow:
    """Lay out the draft blocks behind the committed prefixes (upstream: DFlashWorkerV2, part 1).

    ``block`` is the number of tokens of a block, 1 for a step without drafts.
    """
    batch_size = len(batch.seq_lens)
    prefix_lens = batch.seq_lens
    if worker.uses_triton:
        from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked

        ids, positions, slots = (
            torch.empty((batch_size, block), dtype=torch.int64, device=worker.device)
            for _ in range(3)
        )
        _prepare_dflash_draft_block_unchecked(
            bonus_tokens=draft_input.bonus_tokens.view(-1),
            prefix_lens=prefix_lens.view(-1),
            req_pool_indices=batch.req_pool_indices.view(-1),
            req_to_token=worker.model_runner.req_to_token_pool.req_to_token,
            block_ids_out=ids,
            positions_out=positions,
            cache_loc_out=slots,
            mask_token_id=worker.mask_token_id,
        )
    else:
        ids = torch.full((batch_size, block), worker.mask_token_id, device=worker.device)
        ids[:, 0] = draft_input.bonus_tokens
        positions = prefix_lens[:, None] + torch.arange(block, device=worker.device)
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=worker.model_runner.req_to_token_pool.req_to_token,
            start_offset=prefix_lens,
            end_offset=prefix_lens + block,
            batch_size=batch_size,
            draft_token_num=block,
            device=worker.device,
        ).view(batch_size, block)
    kv_plan = worker.model_runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix_lens,
        seq_lens_cpu=_host_lens(batch, draft_input),
        write_virtual=slots.reshape(-1),
        read_extent=block,
    )
    return BlockWindow(ids, positions, slots, kv_plan, prefix_lens)


def propose(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    draft_input: DFlashDraftInputV2,
    window: BlockWindow,
    drafts: int,
) -> Proposal:
    """Draft the first ``drafts`` tokens of every block greedily.

    The draft model always sees its whole block, since it was trained bidirectionally on it; only
    the columns that may be verified go through the target's lm_head.
    """
    output = _draft_forward(worker, batch, draft_input, window)
    batch_size, block = window.ids.shape
    hidden = output.logits_output.hidden_states.view(batch_size, block, -1)
    log_probs = None
    sampler = worker.draft_sampler
    if sampler is not None and output.can_run_graph:
        read = slice(0, batch_size * (block - 1))
        drafted = sampler.out[read].view(batch_size, block - 1)[:, :drafts]
        if isinstance(sampler, ConfidentDraftSampler):
            # Until the next step's graph, on the same stream, overwrites them.
            log_probs = sampler.log_probs[read].view(batch_size, block - 1)[:, :drafts]
    else:
        wanted = hidden[:, 1 : drafts + 1].reshape(-1, hidden.shape[-1])
        with draft_tp_context(worker.draft_parallel_layout):
            drafted, log_probs = worker.greedy_drafts(wanted)
        drafted = drafted.view(batch_size, drafts)
    return Proposal(
        torch.cat((window.ids[:, :1], drafted), dim=1),
        DraftSignals(
            None if log_probs is None else log_probs.reshape(batch_size, drafts),
            worker.length_ratio(hidden),
        ),
    )


def _draft_forward(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    draft_input: DFlashDraftInputV2,
    window: BlockWindow,
) -> "ModelRunnerOutput":
    """Run the draft model over the windows; its own KV of the block is scratch, never committed."""
    batch_size, block = window.ids.shape
    embed = unwrap_lora_layer(worker.model_runner.model.get_input_embeddings())
    embeddings = embed(window.ids)  # [batch, block, hidden]
    if worker.noise_embed_scale != 1.0:
        embeddings = embeddings * worker.noise_embed_scale
    # The host copy may run one step behind the device; backends need an upper bound only.
    if batch.seq_lens_cpu is not None:
        host_lens = batch.seq_lens_cpu + block
    else:
        host_lens = _host_lens(batch, draft_input)
    num_tokens = batch_size * block
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=batch_size,
        input_ids=window.ids.reshape(-1),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=window.prefix_lens,
        out_cache_loc=window.slots.reshape(-1),
        seq_lens_sum=int(host_lens.sum()),
        seq_lens_cpu=host_lens.to(torch.int32),
        positions=window.positions.reshape(-1),
        input_embeds=embeddings.reshape(num_tokens, -1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker.draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), num_tokens, dtype=torch.int32, device=worker.device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=num_tokens,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    window.kv_plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        return worker.draft_model_runner.forward(forward_batch)


def _host_lens(batch: ScheduleBatch, draft_input: DFlashDraftInputV2) -> torch.Tensor:
    """``[batch]`` host tensor that bounds the lengths: the scheduler's own, else the allocation."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu
    if draft_input.nxt_kv_lens_cpu is not None:
        return draft_input.nxt_kv_lens_cpu
    return torch.tensor([req.kv.kv_allocated_len for req in batch.reqs], dtype=torch.int32)
