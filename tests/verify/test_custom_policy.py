"""A policy of one's own: the example of ``docs/extend.md``, and what is refused."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from adaspec.config import VerifyConfig, load_config
from adaspec.errors import AdaSpecError
from adaspec.verify import DraftSignals, StepLoad, StepOutcome, VerifyPolicy, VerifyShapes
from adaspec.verify.policies import make_policy

BLOCK = 16
CPU = torch.device("cpu")
SHAPES = VerifyShapes(BLOCK, 128, ragged=True, on_host=True)


def load(batch: int) -> StepLoad:
    return StepLoad(tuple(map(str, range(batch))), 10, np.zeros(batch, bool))


def example(directory: Path, has_confidence: bool = True) -> VerifyPolicy:
    config = load_config(directory / "adaspec.toml").verify
    return make_policy(config, SHAPES, CPU, has_confidence)


def test_the_example_of_the_page_gives_the_tokens_to_the_surest_drafts(examples: Path) -> None:
    policy = example(examples)
    assert policy.reads_log_probs
    plan = policy.plan(load(8))
    assert (plan.drafted, plan.tokens, plan.reason) == (True, 64, "custom")
    log_probs = torch.full((8, plan.drafts), -0.01)
    log_probs[4:] = -0.1  # so that their first draft is as sure as the tenth of the others
    allocation = policy.allocate(plan, DraftSignals(log_probs=log_probs))
    assert allocation.lengths.dtype == torch.int32
    assert allocation.lengths.tolist() == [14] * 4 + [2] * 4
    assert allocation.tokens == 64
    lengths = allocation.lengths.numpy().astype(np.int64)
    policy.observe(StepOutcome(plan, 64, 0.01, lengths, lengths - 1, log_probs.numpy()))
    policy.drafter_changed()


def test_the_example_of_the_page_fits_every_batch(examples: Path) -> None:
    policy = example(examples, has_confidence=False)
    assert not policy.reads_log_probs
    for batch in (1, 3, 40, 64, 100):
        plan = policy.plan(load(batch))
        assert plan.tokens == min(max(64, batch), batch * BLOCK)
        assert plan.drafted == (batch < 64)
        lengths = policy.allocate(plan, DraftSignals()).lengths
        assert int(lengths.sum()) == plan.tokens
        assert int(lengths.max() - lengths.min()) <= 1
        assert 1 <= int(lengths.min()) <= int(lengths.max()) <= BLOCK


def test_the_factory_is_given_what_built_in_policies_are_made_of(own_code: Path) -> None:
    (own_code / "own.py").write_text(
        "class Policy:\n"
        "    reads_log_probs = reads_length_ratio = False\n"
        "    plan = allocate = observe = drafter_changed = print\n"
        "    def __init__(self, *given): self.given = given\n"
    )
    config = VerifyConfig(policy="custom", factory="own:Policy")
    for has_confidence in (True, False):
        policy = make_policy(config, SHAPES, CPU, has_confidence)
        assert vars(policy) == {"given": (SHAPES, CPU, has_confidence)}


def test_an_object_that_is_no_policy_is_refused(own_code: Path) -> None:
    (own_code / "own.py").write_text(
        "class Half:\n"
        "    reads_log_probs = reads_length_ratio = False\n"
        "    def __init__(self, *given): pass\n"
        "    def plan(self, load): pass\n"
    )
    config = VerifyConfig(policy="custom", factory="own:Half")
    told = 'verify.factory is "own:Half", which returned an object of type Half without '
    told += "allocate, observe, drafter_changed;"
    with pytest.raises(AdaSpecError, match=f"^{re.escape(told)}"):
        make_policy(config, SHAPES, CPU)


def test_a_length_beside_a_custom_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[verify]\npolicy = "custom"\nfactory = "own:make"\nlength = 4\n')
    with pytest.raises(AdaSpecError, match='the policy "custom" chooses the length itself'):
        load_config(path)
