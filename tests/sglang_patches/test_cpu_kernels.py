"""The PyTorch kernels against the contract of the kernels they replace."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from sglang_patches.cpu.kernels import (
    assign_req_to_token,
    chain_speculative_sampling,
    extend_cache_locs,
)


def test_assign_writes_each_requests_span_and_nothing_else() -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)
    slots = torch.arange(10, 16)
    assign_req_to_token(
        torch.tensor([2, 0, 3]),
        table,
        torch.tensor([1, 5, 4]),
        torch.tensor([4, 8, 4]),
        slots,
        3,
    )
    assert table.tolist() == [
        [0, 0, 0, 0, 0, 13, 14, 15],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 10, 11, 12, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([4, 3], [11, 12, 13, 20, 21, 22], id="uniform"),
        pytest.param([2, 3], [11, 20, 21, 22, 0, 0], id="ragged"),
    ],
)
def test_extend_cache_locs_reads_the_table(ends: list[int], expected: list[int]) -> None:
    table = torch.stack([torch.arange(20, 28), torch.arange(10, 18)]).int()
    slots = extend_cache_locs(
        req_pool_indices=torch.tensor([1, 0]),
        req_to_token=table,
        start_offset=torch.tensor([1, 0], dtype=torch.int32),
        end_offset=torch.tensor(ends, dtype=torch.int32),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected


def test_extend_cache_locs_stays_inside_the_table_at_the_context_limit() -> None:
    table = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    slots = extend_cache_locs(
        req_pool_indices=torch.tensor([0]),
        req_to_token=table,
        start_offset=torch.tensor([2]),
        end_offset=torch.tensor([4]),
        batch_size=1,
        draft_token_num=4,
        device="cpu",
    )
    assert slots.tolist() == [7, 8, 0, 0]


def sample(
    candidates: torch.Tensor, target_probs: torch.Tensor, u: torch.Tensor, final_u: torch.Tensor
) -> list[list[int]]:
    """Committed tokens of every request: accepted drafts and the bonus."""
    batch, block = candidates.shape
    predicts = torch.zeros(batch * block, dtype=torch.int32)
    accept_index = torch.zeros(batch, block, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    unused = torch.zeros(batch, block, dtype=torch.int64)
    chain_speculative_sampling(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=candidates,
        retrive_index=unused,
        retrive_next_token=unused,
        retrive_next_sibling=unused,
        uniform_samples=u,
        uniform_samples_for_final_sampling=final_u,
        target_probs=target_probs,
        draft_probs=torch.zeros_like(target_probs),
    )
    committed = []
    for row, count in enumerate(accepted.tolist()):
        chain = accept_index[row].tolist()
        assert chain == [row * block + i if i <= count else -1 for i in range(block)]
        committed.append(predicts[accept_index[row, : count + 1].long()].tolist())
    return committed


def test_accepts_up_to_the_first_rejection() -> None:
    probs = torch.full((2, 3, 4), 0.25)
    candidates = torch.tensor([[0, 1, 2], [0, 3, 1]])
    u = torch.tensor([[0.1, 0.9, 0.0], [0.1, 0.2, 0.0]])
    committed = sample(candidates, probs, u, torch.tensor([0.0, 0.99]))
    # The first is rejected at 2: its bonus is drawn from {0, 1, 3}; the second is accepted whole.
    assert committed == [[1, 0], [3, 1, 3]]


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_a_certain_token_is_committed_whatever_is_drawn(draw: float) -> None:
    probs = torch.zeros(1, 2, 4)
    probs[..., 2] = 1.0 - 1e-6  # what a softmax of one token may round to
    committed = sample(
        torch.tensor([[0, 2]]), probs, torch.full((1, 2), 0.9999999), torch.tensor([draw])
    )
    assert committed[0][0] == 2


def test_zero_probability_is_never_accepted() -> None:
    probs = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(1, 2, 4)
    committed = sample(torch.tensor([[0, 3]]), probs, torch.zeros(1, 2), torch.tensor([0.4]))
    assert committed == [[1]]


def test_committed_tokens_follow_the_target() -> None:
    """Joint law of the first two tokens equals the product of the target's conditionals."""
    torch.manual_seed(0)
    draws, vocab = 40_000, 4
    first = torch.tensor([0.1, 0.2, 0.3, 0.4])
    after = torch.tensor(
        [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.0, 0.5, 0.5, 0]]
    )
    candidates = torch.tensor([[0, 2]]).expand(draws, -1)
    target_probs = torch.stack([first, after[2]]).expand(draws, -1, -1)
    committed = sample(candidates, target_probs, torch.rand(draws, 2), torch.rand(draws))
    counts: Counter[tuple[int, int]] = Counter()
    for tokens in committed:
        # A rejected draft commits one token; the next step would draw the second from `after`.
        second = tokens[1] if len(tokens) > 1 else int(torch.multinomial(after[tokens[0]], 1))
        counts[tokens[0], second] += 1
    law = first[:, None] * after
    cells = [(a, b) for a in range(vocab) for b in range(vocab) if law[a, b] > 0]
    assert set(counts) <= set(cells)
    observed = [counts[cell] for cell in cells]
    expected = [float(law[cell]) * draws for cell in cells]
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3
