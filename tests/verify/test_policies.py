"""The policies by name, and those that know nothing of time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from adaspec.config import AdaFlashConfig, EmaConfig, VerifyConfig, load_config
from adaspec.errors import AdaSpecError
from adaspec.verify import (
    DraftSignals,
    StepLoad,
    StepOutcome,
    VerifyPolicy,
    VerifyShapes,
    make_policy,
)

BLOCK = 16
CPU = torch.device("cpu")
UNIFORM = VerifyShapes(BLOCK, 16, ragged=False)
RAGGED = VerifyShapes(BLOCK, 16, ragged=True)
LOAD = StepLoad(("a", "b", "c", "d"), 400, np.zeros(4, bool))


def accept(policy: VerifyPolicy, drafts: int, steps: int = 100) -> None:
    for _ in range(steps):
        plan = policy.plan(LOAD)
        lengths = np.full(4, plan.width)
        accepted = np.minimum(drafts, lengths - 1)
        policy.observe(StepOutcome(plan, plan.tokens, 0.01, lengths, accepted))


@pytest.mark.parametrize("name", ["fixed", "ema", "adaflash", "goodput"])
@pytest.mark.parametrize("shapes", [UNIFORM, RAGGED])
def test_every_policy_has_a_plan_for_every_batch(name: str, shapes: VerifyShapes) -> None:
    torch.manual_seed(0)
    policy = make_policy(VerifyConfig(policy=name), shapes, CPU)
    for batch in (1, 3, 16):
        load = StepLoad(tuple(map(str, range(batch))), 10, np.arange(batch) % 2 == 0)
        for _ in range(12):
            plan = policy.plan(load)
            assert batch <= plan.tokens <= batch * BLOCK
            assert plan.drafted or plan.tokens == batch
            if not plan.drafted:
                policy.observe(StepOutcome(plan, batch, 0.01))
                continue
            signals = DraftSignals(
                -torch.rand(batch, BLOCK - 1) if policy.reads_log_probs else None,
                torch.rand(batch) if policy.reads_length_ratio else None,
            )
            allocation = policy.allocate(plan, signals)
            assert allocation.lengths.dtype == torch.int32
            assert int(allocation.lengths.sum()) == allocation.tokens
            assert 1 <= int(allocation.lengths.min()) <= int(allocation.lengths.max()) <= BLOCK
            lengths = allocation.lengths.numpy().astype(np.int64)
            log_probs, ratio = signals.log_probs, signals.length_ratio
            policy.observe(
                StepOutcome(
                    plan,
                    allocation.tokens,
                    0.02,
                    lengths,
                    lengths // 2,
                    None if log_probs is None else log_probs.numpy(),
                    None if ratio is None else ratio.numpy(),
                )
            )
    policy.drafter_changed()


def test_fixed_is_fixed() -> None:
    assert make_policy(VerifyConfig(length=5), RAGGED, CPU).plan(LOAD).tokens == 20
    assert make_policy(VerifyConfig(), UNIFORM, CPU).plan(LOAD).width == BLOCK
    assert not make_policy(VerifyConfig(length=1), UNIFORM, CPU).plan(LOAD).drafted


def test_a_length_without_graphs_is_refused() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=False, widths=(4, 8, 16))
    with pytest.raises(AdaSpecError, match=r"verify\.length is 5.* 4, 8, 16"):
        make_policy(VerifyConfig(length=5), shapes, CPU)


def test_ema_follows_the_accepted_drafts_with_a_margin() -> None:
    policy = make_policy(VerifyConfig(policy="ema", ema=EmaConfig(margin=2.0)), UNIFORM, CPU)
    assert policy.plan(LOAD).width == BLOCK
    accept(policy, 3)
    assert policy.plan(LOAD).width == 6
    accept(policy, 10)
    assert policy.plan(LOAD).width == 13
    policy.drafter_changed()
    assert policy.plan(LOAD).width == BLOCK


def test_ema_uses_widths_the_server_can_run() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=False, widths=(4, 8, 16))
    policy = make_policy(VerifyConfig(policy="ema"), shapes, CPU)
    accept(policy, 3)
    assert policy.plan(LOAD).width == 8


def test_adaflash_rounds_clamps_and_scales_the_head() -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=True, on_host=True)
    config = VerifyConfig(policy="adaflash", adaflash=AdaFlashConfig(rate=1.3, minimum=3, ema=1.0))
    policy = make_policy(config, shapes, CPU)
    ratio = torch.tensor([0.01, 0.25, 0.5, 1.0])
    allocation = policy.allocate(policy.plan(LOAD), DraftSignals(length_ratio=ratio))
    assert allocation.lengths.tolist() == [3, 5, 10, 16]


@pytest.mark.parametrize("on_host", [False, True])
def test_adaflash_smooths_the_length_of_the_batch(on_host: bool) -> None:
    shapes = VerifyShapes(BLOCK, 16, ragged=False, on_host=on_host)
    policy = make_policy(VerifyConfig(policy="adaflash"), shapes, CPU)
    ratio, widths = torch.full((4,), 0.25), []
    for _ in range(30):
        plan = policy.plan(LOAD)
        tokens = policy.allocate(plan, DraftSignals(length_ratio=ratio)).tokens
        widths.append(tokens // 4)
        policy.observe(StepOutcome(plan, tokens, 0.01, length_ratio=ratio.numpy()))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 10
    assert widths[-1] in (4, 5)


def test_adaflash_verifies_the_block_below_its_batch() -> None:
    config = VerifyConfig(policy="adaflash", adaflash=AdaFlashConfig(from_batch=5))
    policy = make_policy(config, UNIFORM, CPU)
    ratio = np.full(4, 0.1, np.float32)
    for _ in range(20):
        plan = policy.plan(LOAD)
        policy.observe(StepOutcome(plan, plan.tokens, 0.01, length_ratio=ratio))
    assert policy.plan(LOAD).width == BLOCK
    many = StepLoad(tuple("abcdefgh"), 0, np.zeros(8, bool))
    assert policy.plan(many).width < BLOCK


def test_adaflash_needs_the_head() -> None:
    policy = make_policy(VerifyConfig(policy="adaflash"), RAGGED, CPU)
    with pytest.raises(ValueError, match="length head"):
        policy.allocate(policy.plan(LOAD), DraftSignals())


def test_settings_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[verify]\npolicy = "ema"\n[verify.ema]\nmargin = 3.5\n')
    assert load_config(path).verify.ema.margin == 3.5
    for text, named in (
        ("[verify.ema]\nweight = 0\n", r"verify\.ema\.weight"),
        ("[verify.adaflash]\nminimun = 2\n", "minimun"),
        ("[verify.goodput]\nexploration = 0.5\n", r"verify\.goodput\.exploration"),
        ('[verify]\npolicy = "ema"\nlength = 4\n', r"verify\.length"),
    ):
        path.write_text(text)
        with pytest.raises(AdaSpecError, match=named):
            load_config(path)
