"""Which cause is named, when several could be."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from adaspec.monitor.follow import REMEDIES
from sglang_patches.online.collapse import Evidence, Figures
from sglang_patches.online.diagnosis import Cause, Checks, Finding, describe, diagnose
from sglang_patches.online.evidence import Ratio
from sglang_patches.online.pairing import Difference, Part

ROOT = Path(__file__).parents[3]
TAPS = Difference("taps", "the drafter taps layers that it was not trained with")
HEAD = Difference("head", "the output matrix is another")


def figures(share: float, error: float = 0.01, fulfilled: float | None = None) -> Figures:
    promised = None if fulfilled is None else Ratio(fulfilled, 0.01, 16)
    return Figures(Ratio(share, error, 16), promised, 1.0, 512, 16)


def evidence(
    *,
    worked: bool = True,
    cached: Figures | None = None,
    fresh: Figures | None = None,
    base: Figures | None = None,
) -> Evidence:
    return Evidence("level", False, figures(0.1), 0.7, worked, cached, fresh, base)


def checks(
    drafter: Sequence[str] | None = (),
    target: Sequence[str] = (),
    differences: Sequence[Difference] = (),
    has_origin: bool = True,
) -> Checks:
    return Checks(
        drafter=lambda: None if drafter is None else list(drafter),
        target=lambda: list(target),
        differences=differences,
        has_origin=has_origin,
        version=lambda: 3,
    )


def find(seen: Evidence | None = None, asked: Checks | None = None) -> Finding:
    return diagnose(seen or evidence(), asked or checks())


def test_every_cause_is_found_by_what_tells_it() -> None:
    much, little = figures(0.7), figures(0.1)
    assert find(asked=checks(drafter=["norm.weight"])).cause == "weights"
    assert find(asked=checks(target=["lm_head.weight"])).cause == "target weights"
    assert find(evidence(base=much)).cause == "version"
    assert find(evidence(cached=little, fresh=much)).cause == "prefix cache"
    assert find().cause == "traffic"
    assert find(asked=checks(drafter=None)).cause == "traffic"
    assert find(evidence(worked=False)).cause == "traffic"
    assert find(evidence(worked=False), checks(has_origin=False)).cause == "unknown"
    for part in get_args(Part):
        wrong = checks(differences=[Difference(part, "it is another")])
        assert find(evidence(worked=False), wrong) == Finding(part, "it is another")


def test_facts_come_before_comparisons() -> None:
    everything = evidence(worked=False, base=figures(0.7), cached=figures(0.1), fresh=figures(0.7))
    asked = checks(["norm.weight"], ["lm_head.weight"], [TAPS, HEAD])
    assert find(everything, asked).cause == "weights"
    assert find(everything, checks((), ["lm_head.weight"], [TAPS])).cause == "target weights"
    found = find(everything, checks((), (), [TAPS, HEAD]))
    assert found.cause == "taps"
    assert "too: head" in found.sentence


def test_a_difference_with_which_the_drafter_has_worked_is_not_the_cause() -> None:
    assert find(evidence(worked=True), checks(differences=[TAPS])).cause == "traffic"


@pytest.mark.parametrize("kind", ["version", "prefix cache"])
def test_a_comparison_needs_a_difference_beyond_noise(kind: str) -> None:
    def compared(least: Figures, most: Figures) -> str:
        if kind == "version":
            return find(Evidence("level", False, least, 0.7, True, None, None, most)).cause
        return find(evidence(cached=least, fresh=most)).cause

    assert compared(figures(0.1), figures(0.7)) == kind
    assert compared(figures(0.1, error=0.15), figures(0.7)) == "traffic"
    assert compared(figures(0.1), figures(0.7, error=0.25)) == "traffic"
    assert compared(figures(0.5), figures(0.7)) == "traffic"


def test_many_names_are_cut_short() -> None:
    sentence = find(asked=checks(drafter=["a", "b", "c", "d", "e"])).sentence
    assert "(a, b, c and 2 more)" in sentence


def test_the_description_has_the_figures() -> None:
    seen = Evidence("expectation", True, figures(0.1, fulfilled=0.2), 0.7, True, None, None, None)
    text = describe(seen)
    assert "10.0% of the first drafts" in text
    assert "512 passes of 16 requests with a cached prefix" in text
    assert "70.0% before" in text
    assert "20% of the drafts to expect" in text


def causes() -> set[str]:
    def flat(annotation: object) -> set[str]:
        if isinstance(annotation, str):
            return {annotation}
        return {name for part in get_args(annotation) for name in flat(part)}

    return flat(Cause)


def test_the_monitor_and_the_documentation_know_every_cause() -> None:
    assert causes() == set(REMEDIES)
    text = (ROOT / "docs" / "operate.md").read_text()
    assert all(f"\n| `{cause}` |" in text for cause in causes())
