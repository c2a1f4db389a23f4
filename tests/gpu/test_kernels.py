"""Our Triton kernels against the tensor operations they stand for.

On a CPU with Triton: ``TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_kernels.py``.
"""

import numpy as np
import pytest
import torch

from adaspec.acceptance import accept_greedy
from adaspec.chains import ChainRows
from adaspec.verify.allocation import allocate
from adaspec.verify.survival import _LEAST_PROBABILITY, DeviceSurvival, SurvivalModel
from sglang_patches.worker.accept import make_verdict
from sglang_patches.worker.graphs import RaggedGraphs
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.gpu


def chains(batch: int, block: int) -> ChainRows:
    """On the CPU; with the shortest and the longest chain."""
    lengths = torch.randint(1, block + 1, (batch,))
    lengths[0], lengths[-1] = block, 1
    return ChainRows.ragged(lengths, int(lengths.sum()), block)


def moved(rows: ChainRows) -> ChainRows:
    assert rows.lengths is not None
    return ChainRows.ragged(rows.lengths.to(DEVICE), rows.total, rows.width)


@pytest.mark.parametrize(("batch", "drafts"), [(1, 15), (3, 15), (7, 4), (32, 15), (130, 15)])
@pytest.mark.parametrize("levels", [0, 4, 1])
def test_drafts_of_highest_priority_are_taken_and_ties_go_to_the_earlier(
    batch: int, drafts: int, levels: int
) -> None:
    from adaspec.verify.allocation_kernel import allocate_in_one_launch

    torch.manual_seed(batch)
    priority = torch.rand(batch, drafts).cumprod(-1)
    if levels:
        priority = (priority * levels).round() / levels
    whole = batch * drafts
    for extra in sorted({0, 1, whole // 3, whole // 2, whole - 1, whole}):
        there = allocate_in_one_launch(priority.to(DEVICE), extra).cpu()
        assert torch.equal(there, allocate(priority, batch + extra)), extra


@pytest.mark.parametrize(("batch", "drafts"), [(1, 15), (7, 4), (32, 15), (130, 15)])
@pytest.mark.parametrize("sampled", [0.0, 0.5])
def test_drafts_are_shared_out_by_the_survival_that_tensor_operations_give(
    batch: int, drafts: int, sampled: float
) -> None:
    from adaspec.verify.allocation_kernel import allocate_by_confidence

    rng = np.random.default_rng(batch)
    model = SurvivalModel(drafts, has_confidence=True)
    model._parameters += rng.normal(scale=0.3, size=model.parameters.shape).astype(np.float32)
    history = rng.normal(size=batch).astype(np.float32)
    kinds = rng.random(batch) < sampled
    log_probs = -torch.rand(batch, drafts) * 3
    log_probs[0, 1], log_probs[-1, 0] = float("nan"), 0.0
    here = DeviceSurvival(model, torch.device("cpu"))
    survival = here(log_probs, history, kinds)
    base, confidence = (m.to(DEVICE) for m in here._maps(history, kinds))
    whole = batch * drafts
    for extra in sorted({0, 1, whole // 3, whole - 1, whole}):
        lengths = allocate_by_confidence(
            log_probs.to(DEVICE), base, confidence, float(_LEAST_PROBABILITY), extra
        ).cpu()
        assert int(lengths.sum()) == batch + extra
        # Rounding may decide between two that are as good; what is expected is the same.
        taken = torch.arange(drafts) < lengths[:, None] - 1
        best = survival.flatten().sort(descending=True).values[:extra].sum()
        torch.testing.assert_close(survival[taken].sum(), best, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("batch", "block"), [(2, 16), (5, 4), (33, 16), (128, 16)])
@pytest.mark.parametrize("spare", [(3, 2), (700, 1), (0, 0), (None, 0)], ids=str)
def test_chains_are_packed_as_on_the_cpu(
    batch: int, block: int, spare: tuple[int | None, int]
) -> None:
    """``spare``: rows and request slots of the graph that the batch leaves over; None: no graph."""
    from sglang_patches.worker.chain_kernels import pack_rows

    torch.manual_seed(batch)
    rows, (more_rows, more_slots) = chains(batch, block), spare
    tokens = torch.randint(0, 999, (batch, block + 1))[:, :block]
    positions = torch.randint(0, 999, (batch, block))
    tiers = () if more_rows is None else (rows.total + more_rows,)
    graphs = RaggedGraphs(block, tiers, batch + more_slots)
    slots = torch.randint(1, 999, (batch, block))
    here = graphs.pack(rows, tokens, positions, slots)
    assert here.layout is not None
    there = pack_rows(
        moved(rows),
        tokens.to(DEVICE),
        positions.to(DEVICE),
        slots.to(DEVICE),
        len(here.tokens),
        here.layout.bs,
    )
    assert torch.equal(there.tokens.cpu(), here.tokens)
    assert torch.equal(there.positions.cpu(), here.positions)
    assert here.slots is not None
    assert torch.equal(there.slots.cpu(), here.slots)
    assert torch.equal(there.lengths.cpu(), here.layout.verify_lens)
    assert torch.equal(there.boundaries.cpu(), here.layout.qo_indptr_device)


@pytest.mark.parametrize("batch", [2, 33, 128])
@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("ragged", [False, True])
def test_chains_are_judged_as_on_the_cpu(batch: int, width: int, ragged: bool) -> None:
    from sglang_patches.worker.chain_kernels import judge_greedy

    torch.manual_seed(batch)
    cpu = torch.device("cpu")
    rows = chains(batch, width) if ragged else ChainRows.uniform(batch, width, cpu)
    device_rows = moved(rows) if ragged else ChainRows.uniform(batch, width, torch.device(DEVICE))
    tokens = torch.randint(0, 2, (batch, width + 1))[:, :width]
    argmax = torch.randint(0, 2, (rows.total + 3,))
    here = make_verdict(tokens, accept_greedy(tokens[:, 1:], argmax[: rows.total], rows))
    committed, commit_lens, bonus = judge_greedy(tokens.to(DEVICE), argmax.to(DEVICE), device_rows)
    assert torch.equal(commit_lens.cpu(), here.commit_lens)
    assert commit_lens.dtype == here.commit_lens.dtype
    assert torch.equal(bonus.cpu(), here.bonus)
    used = torch.arange(width) < here.commit_lens[:, None]
    assert torch.equal(committed.cpu() * used, here.committed * used)


def test_few_sizes_are_compiled_and_all_of_them_before_serving() -> None:
    from adaspec.verify.allocation_kernel import power_bucket
    from sglang_patches.worker.chain_kernels import warm_up

    assert {power_bucket(n) for n in range(1, 257)} == {16, 64, 256}
    warm_up(70, 16, torch.device(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 2048, 4999])
def test_tokens_are_read_off_with_their_log_probabilities(dtype: torch.dtype, vocab: int) -> None:
    from sglang_patches.worker.draft_kernel import read_off

    torch.manual_seed(0)
    logits = (5 * torch.randn(9, vocab)).to(dtype)
    logits[0] = 3.0  # a tie goes to the first
    tokens, log_probs = read_off(logits.to(DEVICE))
    exact = logits.double().log_softmax(-1)
    assert int(tokens[0]) == 0
    torch.testing.assert_close(log_probs.cpu().double(), exact.max(-1).values, atol=1e-5, rtol=0)
    chosen = logits.gather(-1, tokens.cpu()[:, None])[:, 0]
    assert torch.equal(chosen, logits.max(-1).values)
