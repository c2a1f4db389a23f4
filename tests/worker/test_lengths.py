"""What reaches the policy, when, and in which order."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaspec.verify import (
    Allocation,
    DraftSignals,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyShapes,
)
from sglang_patches.worker.lengths import PlannedStep, VerifyLengths, chain_rows

CPU = torch.device("cpu")
SHAPES = VerifyShapes(block_size=4, max_batch=8, ragged=True, on_host=True)


@dataclass
class Policy:
    """Drafts unless told not to; verifies one token more of each request than of the one before."""

    reads_log_probs: bool = True
    reads_length_ratio: bool = False
    drafts: bool = True
    loads: list[StepLoad] = field(default_factory=list)
    seen: list[StepOutcome] = field(default_factory=list)

    def plan(self, load: StepLoad) -> StepPlan:
        self.loads.append(load)
        drafts = 3 if self.drafts else 0
        return StepPlan(load, self.drafts, load.batch * (drafts + 1), drafts, "fixed")

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        lengths = torch.arange(1, plan.load.batch + 1, dtype=torch.int32)
        return Allocation(lengths, int(lengths.sum()))

    def observe(self, outcome: StepOutcome) -> None:
        self.seen.append(outcome)

    def drafter_changed(self) -> None: ...


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def lengths(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> VerifyLengths:
    seconds = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    return VerifyLengths(policy, SHAPES, CPU)


def batch(*names: str, top_k: int = 1) -> Any:
    reqs = [SimpleNamespace(rid=n, sampling_params=SimpleNamespace(top_k=top_k)) for n in names]
    return SimpleNamespace(reqs=reqs, seq_lens_cpu=torch.full((len(names),), 10))


def decode(lengths: VerifyLengths, *names: str) -> PlannedStep:
    lengths.start_step()
    step = lengths.plan(batch(*names))
    if step.plan.drafted:
        lengths.allocate(step, DraftSignals(torch.full((len(names), 3), -0.5)))
    return step


def prefill(lengths: VerifyLengths) -> None:
    lengths.start_step()
    lengths.interrupt()


def test_outcomes_come_in_order_with_counts_that_are_late(
    lengths: VerifyLengths, policy: Policy
) -> None:
    first = decode(lengths, "a", "b")
    second = decode(lengths, "a", "b", "c")  # overlap: the counts of the first are still missing
    assert policy.seen == []
    assert lengths.count([0, 1]) is first
    assert [o.plan for o in policy.seen] == [first.plan]
    decode(lengths, "a")
    lengths.count([0, 0, 2])
    assert [o.plan for o in policy.seen] == [first.plan, second.plan]
    outcome = policy.seen[1]
    assert outcome.lengths is not None
    assert outcome.lengths.tolist() == [1, 2, 3]
    assert outcome.accepted is not None
    assert outcome.accepted.tolist() == [0, 0, 2]
    assert outcome.log_probs is not None
    assert outcome.log_probs.shape == (3, 3)
    assert (outcome.tokens, outcome.seconds) == (6, 1.0)


def test_without_overlap_a_step_waits_for_the_start_of_the_next(
    lengths: VerifyLengths, policy: Policy
) -> None:
    decode(lengths, "a")
    lengths.count([0])
    assert policy.seen == []
    decode(lengths, "a")
    assert [o.seconds for o in policy.seen] == [1.0]


def test_a_step_before_a_prefill_has_no_time(lengths: VerifyLengths, policy: Policy) -> None:
    decode(lengths, "a")
    lengths.count([0])
    prefill(lengths)
    decode(lengths, "a", "b")
    lengths.count([0, 0])
    decode(lengths, "a", "b")
    assert [o.seconds for o in policy.seen] == [None, 1.0]


def test_an_untypical_step_has_no_time(lengths: VerifyLengths, policy: Policy) -> None:
    decode(lengths, "a").is_typical = False
    lengths.count([0])
    decode(lengths, "a")
    assert [o.seconds for o in policy.seen] == [None]


def test_plain_steps_have_no_lengths_and_no_counts(lengths: VerifyLengths, policy: Policy) -> None:
    policy.drafts = False
    step = decode(lengths, "a", "b")
    assert step.host_lengths() == [1, 1]
    lengths.count([0, 0])
    decode(lengths, "a", "b")
    (outcome,) = policy.seen
    assert (outcome.tokens, outcome.lengths, outcome.accepted) == (2, None, None)


def test_counts_that_fit_no_step_are_left_out(lengths: VerifyLengths, policy: Policy) -> None:
    assert lengths.count([1]) is None
    decode(lengths, "a", "b")
    assert lengths.count([1]) is None
    decode(lengths, "a")
    lengths.count([0])
    decode(lengths, "a")
    assert [len(o.plan.load.requests) for o in policy.seen] == [1]


def test_the_load_is_the_same_object_while_the_batch_is(
    lengths: VerifyLengths, policy: Policy
) -> None:
    for names in (("a", "b"), ("a", "b"), ("a",)):
        lengths.start_step()
        lengths.plan(batch(*names, top_k=50))
    first, second, third = policy.loads
    assert first.requests is second.requests
    assert (third.requests, third.context_tokens) == (("a",), 10)
    assert first.sampled.tolist() == [True, True]


def test_equal_lengths_are_a_uniform_step() -> None:
    def rows(*each: int) -> Any:
        return chain_rows(Allocation(torch.tensor(each, dtype=torch.int32), sum(each)), SHAPES)

    assert rows(3, 3).lengths is None
    assert rows(3, 3).width == 3
    assert rows(2, 4).lengths.tolist() == [2, 4]
    assert rows(2, 4).width == 4
