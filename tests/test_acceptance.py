"""The acceptance rules against brute force: exact greedy prefixes, unchanged sampling laws."""

from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from adaspec.acceptance import (
    Acceptance,
    SamplingRules,
    accept_greedy,
    accept_sampled,
    filtered_weights,
    prefix_length,
    walk_acceptance,
)
from adaspec.chains import ChainRows

VOCAB = 5
DRAWS = 60_000
CPU = torch.device("cpu")


def rules(
    count: int,
    temperature: float = 1.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingRules:
    return SamplingRules(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        is_filtered=1 < top_k < VOCAB or top_p < 1 or min_p > 0,
        largest_top_k=top_k,
    )


def greedy(drafts: torch.Tensor, target: torch.Tensor) -> Acceptance:
    """Chains of equal length; target ``[batch, n + 1]``."""
    return accept_greedy(drafts, target.flatten(), ChainRows.uniform(*target.shape, CPU))


def sampled(drafts: torch.Tensor, logits: torch.Tensor, law: SamplingRules) -> Acceptance:
    """Chains of equal length; logits ``[batch, n + 1, vocab]``."""
    rows = ChainRows.uniform(*logits.shape[:2], CPU)
    return accept_sampled(drafts, logits.flatten(0, 1), law, rows)


def plain_distribution(logits: torch.Tensor, rule: SamplingRules) -> torch.Tensor:
    """The law of one plain sample, computed token by token: [vocab]."""
    probs = (logits.double() / rule.temperature[0].double()).softmax(-1)
    order = sorted(range(VOCAB), key=lambda token: -probs[token])
    kept, mass = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for rank, token in enumerate(order):
        if rank < rule.top_k[0] and mass <= rule.top_p[0]:
            kept[token] = probs[token]
        mass += float(probs[token])
    kept[kept < kept.max() * rule.min_p[0].double()] = 0
    return kept / kept.sum()


def test_greedy_keeps_exactly_the_matching_prefix_for_every_pattern() -> None:
    for pattern in product([0, 1], repeat=4):
        drafts = torch.tensor([[10, 11, 12, 13]])
        target = torch.tensor([[10, 11, 12, 13, 99]])
        for column, matches in enumerate(pattern):
            if not matches:
                target[0, column] += 50
        accepted, bonus = greedy(drafts, target)
        expected = (*pattern, 0).index(0)
        assert accepted.item() == expected
        assert bonus.item() == target[0, expected]


def test_a_chain_without_drafts_commits_one_token() -> None:
    accepted, bonus = greedy(torch.empty((2, 0), dtype=torch.int64), torch.tensor([[3], [4]]))
    assert accepted.tolist() == [0, 0]
    assert bonus.tolist() == [3, 4]


def test_greedy_chains_of_different_lengths_are_judged_as_each_alone() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 4, 2, 3, 4, 1, 2])
    drafts = torch.randint(0, 2, (7, 3))
    rows = ChainRows.ragged(lengths, int(lengths.sum()), 4)
    target = torch.randint(0, 2, (rows.total,))
    accepted, bonus = accept_greedy(drafts, target, rows)
    for i, (length, own) in enumerate(
        zip(lengths.tolist(), target.split(lengths.tolist()), strict=True)
    ):
        alone = greedy(drafts[i : i + 1, : length - 1], own[None])
        assert (accepted[i], bonus[i]) == (alone.accepted[0], alone.bonus[0])


def test_prefix_length_stops_at_the_first_mismatch() -> None:
    assert prefix_length(torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool()).tolist() == [2, 0]


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.7, "temperature": 0.7},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_joint_law_of_the_first_two_tokens_is_that_of_plain_sampling(
    rule: dict[str, float],
    ragged: bool,
) -> None:
    torch.manual_seed(0)
    table = torch.randn(VOCAB + 1, VOCAB) * 1.5  # logits after token t; row VOCAB: at the start
    drafts = torch.tensor([1, 2])
    law = rules(DRAWS, **rule)  # type: ignore[arg-type]
    chain = torch.stack([table[VOCAB], table[1], table[2]])
    rows = ChainRows.uniform(DRAWS, 3, CPU)
    if ragged:
        lengths = torch.randint(1, 4, (DRAWS,))
        rows = ChainRows.ragged(lengths, int(lengths.sum()), 3)
    logits = chain[rows.column]
    accepted, bonus = accept_sampled(drafts.expand(DRAWS, 2), logits, law, rows)
    if ragged:
        assert (accepted < lengths).all()
    one = rules(1, **rule)  # type: ignore[arg-type]
    laws = torch.stack([plain_distribution(row, one) for row in table])
    # Where only the bonus is known the second token is drawn by the next (plain) step.
    first = torch.where(accepted > 0, drafts[0], bonus)
    continued = torch.multinomial(laws[bonus], 1).squeeze(1)
    second = torch.where(accepted == 0, continued, torch.where(accepted == 1, bonus, drafts[1]))
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).double()
    expected = (laws[VOCAB][:, None] * laws[:VOCAB]).reshape(-1) * DRAWS
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert chisquare(observed[possible], expected[possible]).pvalue > 1e-3


def test_greedy_rows_of_a_sampled_batch_follow_the_argmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 3, VOCAB)
    target = logits.argmax(-1)
    law = rules(64, top_k=1)
    drafts = target[:, :2].clone()
    drafts[::2, 1] = (drafts[::2, 1] + 1) % VOCAB
    accepted, bonus = sampled(drafts, logits, law)
    expected = greedy(drafts, target)
    assert torch.equal(accepted, expected.accepted)
    assert torch.equal(bonus, expected.bonus)


def test_a_token_with_all_the_mass_is_never_replaced() -> None:
    logits = torch.full((256, 2, VOCAB), float("-inf"))
    logits[..., 3] = 0.0
    accepted, bonus = sampled(torch.full((256, 1), 3), logits, rules(256))
    assert accepted.eq(1).all()
    assert bonus.eq(3).all()


def test_a_sampled_chain_without_drafts_is_a_plain_sample() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    accepted, bonus = sampled(
        torch.empty((DRAWS, 0), dtype=torch.int64), logits.expand(DRAWS, 1, VOCAB), rules(DRAWS)
    )
    assert accepted.eq(0).all()
    observed = torch.bincount(bonus, minlength=VOCAB)
    assert chisquare(observed, logits.double().softmax(-1) * DRAWS).pvalue > 1e-3


def test_filters_agree_with_a_token_by_token_reference() -> None:
    torch.manual_seed(1)
    for top_k, top_p, min_p in product([2, 4, VOCAB], [0.3, 0.9, 1.0], [0.0, 0.2]):
        logits = torch.randn(1, VOCAB)
        law = rules(1, top_k=top_k, top_p=top_p, min_p=min_p)
        weights, tokens = filtered_weights(logits.softmax(-1), law)
        dense = torch.zeros(VOCAB).scatter(0, tokens[0], weights[0])
        torch.testing.assert_close(
            (dense / dense.sum()).double(), plain_distribution(logits[0], law)
        )


def test_walking_counts_the_passes_of_speculative_decoding() -> None:
    # anchors 0..5 of a 7-token response: 3 accepted at 0, then 0 at 4, then 2 offered at 5
    assert walk_acceptance(torch.tensor([3, 0, 0, 0, 0, 0]), 7) == (6, 3)
