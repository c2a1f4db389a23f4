"""Verification: one target pass over the drafted tokens, and the logits it must be judged by."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_patches.worker.draft import BlockWindow

if TYPE_CHECKING:
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_patches.worker.worker import AdaSpecWorker


def target_forward(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    draft_input: DFlashDraftInputV2,
    window: BlockWindow,
    tokens: torch.Tensor,
) -> "GenerationBatchResult":
    """Run the target over ``tokens`` (``[batch, width]``), causally behind each prefix.

    Returns SGLang's ``GenerationBatchResult`` of the pass: logits for every row of ``tokens``,
    request-major, and the tapped hidden states of the same rows.
    """
    width = tokens.shape[1]
    columns = slice(0, width)
    verify_input = DFlashVerifyInput(
        draft_token=tokens.reshape(-1),
        positions=window.positions[:, columns].reshape(-1),
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=window.kv_plan,
        kv_loc_cols=columns,
    )
    batch.out_cache_loc = window.slots[:, columns].reshape(-1)
    # SGLang plans attention from host lengths that include the verified tokens; the scheduler's
    # own bookkeeping must not see them.
    scheduler_lens = (batch.seq_lens_cpu, batch.seq_lens_sum)
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    elif draft_input.nxt_kv_lens_cpu is not None:
        batch.seq_lens_cpu = draft_input.nxt_kv_lens_cpu
        batch.seq_lens_sum = int(draft_input.nxt_kv_lens_sum)
    forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = scheduler_lens
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )


def constrain_logits(
    worker: "AdaSpecWorker",
    batch: ScheduleBatch,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    grammar_tree: GrammarTree | None,
    grammar_barrier: Callable[[], None] | None,
) -> None:
    """Apply to ``logits`` (``[batch · width, vocab]``, in place) what plain decoding would.

    Row ``(r, j)`` predicts the token after ``tokens[r, : j + 1]``, so penalties count the drafted
    tokens before it and the grammar is advanced over them. The order is that of
    ``ModelRunner._preprocess_logits`` and ``Sampler._preprocess_logits``: penalties, grammar,
    logit bias, custom processors.
    """
    info = batch.sampling_info
    if info is None:
        return
    worker.history.apply_penalties(batch.reqs, logits, tokens)
    if grammar_tree is not None:
        grammar_mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree,
            sampling_info=info,
            device=logits.device,
            barrier=grammar_barrier,
        )
        if grammar_mask is not None:
            grammar_mask.apply(logits)
    batch_size, width = tokens.shape
    if info.logit_bias is not None:
        bias = info.logit_bias.to(device=logits.device, dtype=logits.dtype)
        logits.view(batch_size, width, -1).add_(bias[:, None, :])
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=width)
