"""Step times measured before the server serves, on batches that are nobody's.

The passes are those of real steps; they read and write the pools' padding slot only. What the
scheduler does between steps is not in these times; live steps correct them soon.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from adaspec.chains import ChainRows
from adaspec.verify import CostSample
from sglang_patches.worker.draft import BlockWindow, open_window, propose
from sglang_patches.worker.graphs import PackedChains
from sglang_patches.worker.verify import kv_places, pack_chains

if TYPE_CHECKING:
    from sglang_patches.worker.worker import AdaSpecWorker

_CONTEXT = 64  # tokens of each request
_REPEATS = 3  # on a GPU, where a step is short


@dataclass(frozen=True)
class ProbeBatch:
    """What drafting reads of a ``ScheduleBatch``, and of a ``DFlashDraftInputV2``."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    bonus_tokens: torch.Tensor
    can_run_decode_cuda_graph: bool = False


def probe(
    worker: "AdaSpecWorker", steps: Iterable[tuple[int, int, bool]], seconds: float
) -> list[CostSample]:
    """Time these steps, small ones first, until ``seconds`` have passed.

    Args:
        steps: (batch, tokens, drafted) of each; see `GoodputPolicy.probe_steps`.
    """
    table = worker.model_runner.req_to_token_pool.req_to_token
    started, samples = time.perf_counter(), []
    with torch.inference_mode():
        for batch, tokens, drafted in sorted(steps, key=lambda step: (step[1], step[2])):
            if time.perf_counter() - started > seconds:
                break
            if batch > table.shape[0]:
                continue
            _run(worker, batch, tokens, drafted)  # first times are of memory that is not there yet
            for _ in range(_REPEATS if worker.uses_triton else 1):
                begun = time.perf_counter()
                _run(worker, batch, tokens, drafted)
                taken = time.perf_counter() - begun
                samples.append(CostSample(batch, tokens, batch * _CONTEXT, drafted, taken))
    return samples


def _run(worker: "AdaSpecWorker", size: int, tokens: int, drafted: bool) -> None:
    """One step of ``size`` requests, up to the target's choice of tokens."""
    device = torch.device(worker.device)
    lens = torch.full((size,), _CONTEXT, dtype=torch.int64, device=device)
    batch = ProbeBatch(torch.arange(size, device=device), lens, lens.cpu(), torch.zeros_like(lens))
    window = open_window(worker, batch, batch, worker.block_size if drafted else 1)
    rows = ChainRows.uniform(size, 1, device)
    chains = window.ids[:, :1]
    if drafted:
        spread = torch.arange(size, device=device) < tokens % size
        lengths = tokens // size + spread.long()
        longest = -(-tokens // size)
        rows = ChainRows.ragged(lengths, tokens, longest)
        chains = propose(worker, batch, batch, window, longest - 1).tokens
    packed = pack_chains(worker, window, chains, rows)
    output = worker.model_runner.forward(_target_batch(worker, batch, window, packed, rows))
    output.logits_output.next_token_logits.argmax(dim=-1)
    if drafted:
        slots = torch.zeros(rows.total, dtype=torch.int64, device=device)
        features = output.logits_output.hidden_states
        worker.context.commit(rows, features, slots, packed.positions, torch.ones_like(lens))
    if worker.uses_triton:
        torch.cuda.synchronize()


def _target_batch(
    worker: "AdaSpecWorker",
    batch: ProbeBatch,
    window: BlockWindow,
    packed: PackedChains,
    rows: ChainRows,
) -> ForwardBatch:
    verify_input = DFlashVerifyInput(
        draft_token=packed.tokens,
        positions=packed.positions,
        draft_token_num=rows.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=packed.layout,
    )
    host_lens = batch.seq_lens_cpu + rows.width
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=rows.batch,
        input_ids=packed.tokens,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=torch.zeros_like(packed.tokens),
        seq_lens_sum=int(host_lens.sum()),
        seq_lens_cpu=host_lens,
        positions=packed.positions,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=verify_input,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    kv_plan, columns = kv_places(window, packed, rows)
    kv_plan.bind(forward_batch, worker.model_runner.kv_index_translator, cols=columns)
    return forward_batch
