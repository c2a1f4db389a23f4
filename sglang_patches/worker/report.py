"""What requests asked to see of a verify step: log-probabilities and sampling masks."""

from typing import TYPE_CHECKING

from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture

from adaspec.chains import ChainRows
from sglang_patches.worker.accept import Verdict

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def report(
    batch: "ScheduleBatch",
    draft_input: "DFlashDraftInputV2",
    logits_output: "LogitsProcessorOutput",
    verdict: Verdict,
    rows: ChainRows,
) -> None:
    """Attach to ``logits_output`` what requests of the batch asked to see."""
    info = batch.sampling_info
    wants_mask = info is not None and info.sampling_mask_batch_indices is not None
    if not batch.return_logprob and not wants_mask:
        return
    if rows.lengths is not None:  # both want [batch · width, vocab]
        logits = logits_output.next_token_logits
        logits_output.next_token_logits = rows.expand(logits).flatten(0, 1)
    mask_capture = SpeculativeSamplingMaskCapture.from_logits(
        info,
        next_token_logits=logits_output.next_token_logits,
        draft_input=draft_input,
        draft_token_num=rows.width,
        bs=rows.batch,
    )
    if mask_capture is not None:
        logits_output.sampling_mask_output = mask_capture.build_output(
            out_tokens=verdict.committed, commit_lens=verdict.commit_lens
        )
    if batch.return_logprob:
        compute_spec_logprobs(
            batch, logits_output, verdict.committed.reshape(-1), chain_stride=rows.width
        )
