from collections.abc import Sequence

import numpy as np
import pytest

from online.config import GateSection
from online.gate import judge, relative_gain, tokens_per_pass
from online.shadow import Walk

CONFIG = GateSection(min_requests=4)


def walks(rates: Sequence[float], passes: int = 100) -> list[Walk]:
    return [Walk(round(rate * passes), passes) for rate in rates]


RATES = np.random.default_rng(0).uniform(1.5, 4.0, 20)


def test_a_better_candidate_is_published_with_its_numbers() -> None:
    verdict = judge(walks(RATES * 1.1), walks(RATES), walks(RATES), 0, CONFIG)
    assert verdict.action == "publish"
    assert verdict.candidate == pytest.approx(verdict.incumbent * 1.1, rel=0.01)
    gain = verdict.over_incumbent
    assert gain.low <= gain.estimate <= gain.high
    assert gain.estimate == pytest.approx(0.1, abs=0.01)
    assert verdict.requests == 20


@pytest.mark.parametrize("factor", [1.0, 0.999, 0.9])
def test_a_candidate_that_does_not_gain_is_kept_back(factor: float) -> None:
    verdict = judge(walks(RATES * factor), walks(RATES), walks(RATES), 3, CONFIG)
    assert verdict.action == "keep"
    assert (verdict.over_incumbent.high < 0) == (factor < 1.0)


def test_a_gain_on_average_that_may_be_a_loss_is_kept_back() -> None:
    noise = np.where(np.arange(20) % 2, 1.5, 0.55)
    verdict = judge(walks(RATES * noise), walks(RATES), walks(RATES), 3, CONFIG)
    assert verdict.over_incumbent.low < -CONFIG.tolerance
    assert verdict.action == "keep"


def test_the_base_must_be_beaten_too() -> None:
    verdict = judge(walks(RATES * 1.1), walks(RATES), walks(RATES * 1.2), 3, CONFIG)
    assert verdict.over_incumbent.estimate > 0
    assert verdict.action == "base"
    assert verdict.incumbent_over_base.high < 0


def test_the_base_is_never_left_for_itself() -> None:
    verdict = judge(walks(RATES * 0.9), walks(RATES), walks(RATES), 0, CONFIG)
    assert verdict.action == "keep"


def test_too_little_evidence_decides_nothing() -> None:
    verdict = judge(walks(RATES[:3] * 2), walks(RATES[:3]), walks(RATES[:3]), 3, CONFIG)
    assert (verdict.action, verdict.requests) == ("keep", 3)
    assert judge([], [], [], 0, CONFIG).action == "keep"


def test_pairing_sees_a_small_gain_in_unlike_requests() -> None:
    gain = relative_gain(walks(RATES * 1.03, 1000), walks(RATES, 1000), 0.9)
    assert 0.02 < gain.low < gain.high < 0.04


def test_the_verdict_is_reproducible() -> None:
    arguments = (walks(RATES * 1.05), walks(RATES), walks(RATES), 2, CONFIG)
    assert judge(*arguments) == judge(*arguments)


def test_rates_are_weighted_by_passes() -> None:
    assert tokens_per_pass([Walk(30, 10), Walk(10, 10)]) == 2.0
    assert tokens_per_pass([Walk(30, 10), Walk(100, 100)]) == pytest.approx(130 / 110)
