"""Acceptance and penalties give on the GPU what they give on the CPU."""

import pytest
import torch

from adaspec.acceptance import (
    SamplingRules,
    accept_sampled,
    filtered_weights,
)
from adaspec.chains import ChainRows
from sglang_patches.worker.accept import make_verdict
from sglang_patches.worker.history import OutputHistory
from tests.worker.test_history import PENALTIES, VOCAB, Params, Request

pytestmark = pytest.mark.gpu

DRAWS = 40_000


def rules(batch: int, device: str, *, temperature: float = 1.0, top_k: int, top_p: float = 1.0):
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    return SamplingRules(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(0.0, torch.float32),
        is_filtered=top_k > 1 and (top_k < VOCAB or top_p < 1),
        largest_top_k=top_k,
    )


def layout(batch: int, width: int, device: str, *, ragged: bool) -> ChainRows:
    if not ragged:
        return ChainRows.uniform(batch, width, torch.device(device))
    lengths = torch.arange(batch) % width + 1
    return ChainRows.ragged(lengths.to(device), int(lengths.sum()), width)


@pytest.mark.parametrize("ragged", [False, True])
def test_greedy_rows_of_a_sampled_batch(ragged: bool) -> None:
    torch.manual_seed(0)
    rows, device_rows = (layout(32, 5, device, ragged=ragged) for device in ("cpu", "cuda"))
    drafts, logits = torch.randint(0, VOCAB, (32, 4)), torch.randn(rows.total, VOCAB)
    here = accept_sampled(drafts, logits, rules(32, "cpu", top_k=1), rows)
    there = accept_sampled(drafts.cuda(), logits.cuda(), rules(32, "cuda", top_k=1), device_rows)
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(theirs.cpu(), ours)


def test_filters() -> None:
    torch.manual_seed(0)
    probs = torch.randn(8, VOCAB).softmax(-1)
    here = filtered_weights(probs, rules(8, "cpu", top_k=7, top_p=0.8))
    there = filtered_weights(probs.cuda(), rules(8, "cuda", top_k=7, top_p=0.8))
    torch.testing.assert_close(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_first_committed_token_has_the_targets_law(top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB) * 1.5
    rows = layout(DRAWS, 3, "cuda", ragged=False)
    tokens = torch.tensor([[0, 4, 7]]).cuda().expand(DRAWS, -1)
    expanded = logits.cuda()[rows.column]
    settings = rules(DRAWS, "cuda", temperature=0.9, top_k=VOCAB, top_p=top_p)
    verdict = make_verdict(tokens, accept_sampled(tokens[:, 1:], expanded, settings, rows))
    counts = torch.bincount(verdict.committed[:, 0], minlength=VOCAB).double().cpu()

    probs = (logits[:1] / 0.9).softmax(-1)
    weights, order = filtered_weights(probs, rules(1, "cpu", top_k=VOCAB, top_p=top_p))
    law = torch.zeros(VOCAB, dtype=torch.float64)
    law[order[0]] = (weights / weights.sum())[0].double()
    possible = law > 0
    assert not counts[~possible].any()
    expected = law[possible] * DRAWS
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Chi-square, by its normal approximation at five standard deviations.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_penalties(params: Params) -> None:
    torch.manual_seed(0)
    histories = {device: OutputHistory(VOCAB, device) for device in ("cpu", "cuda")}
    reqs = [Request("free", Params()), Request("a", params), Request("b", params)]
    first = torch.tensor([3, 4, 4])
    for device, history in histories.items():
        history.observe_prefill(reqs, first.to(device))  # type: ignore[arg-type]
    for step in range(4):
        tokens, logits = torch.randint(0, VOCAB, (3, 4)), torch.randn(12, VOCAB)
        committed = torch.randint(0, VOCAB, (3, 4))
        commit_lens = torch.randint(1, 5, (3,), dtype=torch.int32)
        penalised = {}
        for device, history in histories.items():
            penalised[device] = logits.clone().to(device)
            rows = layout(3, 4, device, ragged=False)
            history.apply_penalties(reqs, penalised[device], tokens.to(device), rows)  # type: ignore[arg-type]
            history.observe_commit(reqs, committed.to(device), commit_lens.to(device))  # type: ignore[arg-type]
        torch.testing.assert_close(penalised["cuda"].cpu(), penalised["cpu"])
        assert step or not torch.equal(penalised["cpu"], logits)
