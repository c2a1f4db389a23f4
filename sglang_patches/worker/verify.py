"""Verification: one target pass over the drafted tokens, and the logits it must be judged by."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from adaspec.chains import ChainRows
from sglang_patches.worker.draft import BlockWindow
from sglang_patches.worker.graphs import PackedChains

if TYPE_CHECKING:
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_patches.worker.worker import AdaSpecWorker


def pack_chains(
    worker: "AdaSpecWorker", window: BlockWindow, tokens: torch.Tensor, rows: ChainRows
) -> PackedChains:
    """Lay out the chains in ``tokens`` (``[batch, width]``) for a pass of the target."""
    if rows.lengths is None and not worker.is_ragged:
        positions = rows.pack(window.positions[:, : rows.width])
        return PackedChains(rows.pack(tokens), positions, None)
    packed = worker.graphs.pack(rows, tokens, window.positions, window.slots)
    if packed.slots is None:
        return packed
    plan = window.kv_plan
    own = worker.model_runner.kv_index_translator.plan(
        req_pool_indices=plan.req_pool_indices,
        seq_lens=plan.seq_lens,
        seq_lens_cpu=plan.seq_lens_cpu,
        write_virtual=packed.slots,
        read_extent=plan.read_extent,
    )
    return replace(packed, kv_plan=own)


def kv_places(
    window: BlockWindow, packed: PackedChains, rows: ChainRows
) -> tuple[KVLocPlan, slice | None]:
    """The plan of the rows' KV slots, and the columns of its window that they are."""
    if packed.kv_plan is None:
        return window.kv_plan, slice(0, rows.width)
    return packed.kv_plan, None


def target_forward(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    draft_input: DFlashDraftInputV2,
    window: BlockWindow,
    packed: PackedChains,
    rows: ChainRows,
) -> "GenerationBatchResult":
    """Run the target over chains, behind each prefix.

    Returns SGLang's ``GenerationBatchResult`` of the pass: logits for every row of ``rows``, and
    the tapped hidden states of the same rows, perhaps with padding behind.
    """
    kv_plan, columns = kv_places(window, packed, rows)
    verify_input = DFlashVerifyInput(
        draft_token=packed.tokens,
        positions=packed.positions,
        draft_token_num=rows.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=packed.layout,
        kv_loc_plan=kv_plan,
        kv_loc_cols=columns,
    )
    batch.out_cache_loc = kv_plan.virtual_write_ids(cols=columns)
    # SGLang plans attention from host lengths that include the verified tokens; the scheduler's
    # own bookkeeping must not see them.
    scheduler_lens = (batch.seq_lens_cpu, batch.seq_lens_sum)
    if batch.seq_lens_cpu is not None:
        # Where lengths are on the device only, backends are content with an upper bound.
        on_host = rows.lengths is not None and rows.lengths.device.type == "cpu"
        batch.seq_lens_cpu = batch.seq_lens_cpu + (rows.lengths if on_host else rows.width)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    elif draft_input.nxt_kv_lens_cpu is not None:
        batch.seq_lens_cpu = draft_input.nxt_kv_lens_cpu
        batch.seq_lens_sum = int(draft_input.nxt_kv_lens_sum)
    forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = scheduler_lens
    result = worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    if len(packed.tokens) > rows.total:
        logits_output = result.logits_output
        logits_output.next_token_logits = logits_output.next_token_logits[: rows.total]
    return result


def constrain_logits(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    rows: ChainRows,
    grammar_tree: GrammarTree | None,
    grammar_barrier: Callable[[], None] | None,
) -> None:
    """Apply to ``logits`` (``[rows, vocab]``, in place) what plain decoding would.

    The row of column j predicts the token after ``tokens[r, : j + 1]``, so penalties count the
    drafted tokens before it and the grammar is advanced over them. The order is that of
    ``ModelRunner._preprocess_logits`` and ``Sampler._preprocess_logits``: penalties, grammar,
    logit bias, custom processors.
    """
    info = batch.sampling_info
    if info is None:
        return
    worker.history.apply_penalties(batch.reqs, logits, tokens, rows)
    if grammar_tree is not None:
        grammar_mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree,
            sampling_info=info,
            device=logits.device,
            barrier=grammar_barrier,
        )
        if grammar_mask is not None:
            if rows.lengths is not None:
                grammar_mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask[rows.cell])
            grammar_mask.apply(logits)
    if info.logit_bias is not None:
        bias = info.logit_bias.to(device=logits.device, dtype=logits.dtype)  # [batch, vocab]
        if rows.lengths is None:
            rows.expand(logits).add_(bias[:, None, :])
        else:
            logits.add_(rows.repeat(bias))
    if info.has_custom_logit_processor:
        blocks = rows.expand(logits).flatten(0, 1)  # [batch · width, vocab], a view if uniform
        apply_custom_logit_processor(blocks, info, num_tokens_in_batch=rows.width)
        if rows.lengths is not None:
            logits.copy_(blocks[rows.cell])
