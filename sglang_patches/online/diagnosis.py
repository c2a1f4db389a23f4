"""Why acceptance has collapsed: one cause by name, and one sentence with what to do.

Causes that are facts about this server come first: weights in memory that are not those that were
loaded; then, if the drafter has never worked here, what it was trained with and is served without.
Then those that are told by comparison: with the base, with requests that reused no prefix. What is
left is traffic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_patches.online.collapse import Evidence, Figures
from sglang_patches.online.pairing import Difference, Part

Cause = Literal["weights", "target weights", "version", "prefix cache", "traffic", "unknown"] | Part

_MOST_NAMES = 3
# The share of first drafts of one kind of steps that is too far below that of another.
_FAR_BELOW = 0.5


@dataclass(frozen=True)
class Finding:
    """A cause, and a sentence that says what is wrong and what to do."""

    cause: Cause
    sentence: str


@dataclass(frozen=True)
class Checks:
    """What can be asked of a server; each call may wait for the device.

    Attributes:
        drafter: names of the drafter's weights that are not those that were loaded; None if it
            cannot be told.
        target: names of the target's weights that are not those that were loaded.
        differences: what is served otherwise than the drafter was trained.
        has_origin: whether it is known what the drafter was trained with.
        version: number of the live version.
    """

    drafter: Callable[[], list[str] | None]
    target: Callable[[], list[str]]
    differences: Sequence[Difference]
    has_origin: bool
    version: Callable[[], int]


def diagnose(evidence: Evidence, checks: Checks) -> Finding:
    """The likeliest cause."""
    wrong = checks.drafter()
    if wrong:
        return Finding(
            "weights",
            f"the drafter's weights in memory are not those that were loaded ({_list(wrong)}), as "
            "after an update or a release of memory through SGLang's endpoints; restart the "
            "server, and publish drafters with `adaspec control publish` only",
        )
    wrong = checks.target()
    if wrong:
        return Finding(
            "target weights",
            f"the target's weights have changed since the start ({_list(wrong)}) and the drafter "
            "fits those from before; serve a drafter of the new weights, or let it learn with "
            "`adaspec serve --online`",
        )
    if not evidence.worked and checks.differences:
        first = checks.differences[0]
        others = [difference.part for difference in checks.differences[1:]]
        more = f" (other than in training, too: {', '.join(others)})" if others else ""
        return Finding(first.part, first.sentence + more)
    number = checks.version()
    if evidence.base is not None and _far_below(evidence.figures, evidence.base):
        return Finding(
            "version",
            f"version {number} itself: the frozen base has {_share(evidence.base)} of its first "
            "drafts accepted in the same time; if the server does not return to it by itself, "
            "`adaspec control roll-back`",
        )
    cached, fresh = evidence.cached, evidence.fresh
    if cached is not None and fresh is not None and _far_below(cached, fresh):
        return Finding(
            "prefix cache",
            f"requests that found most of their prompt in the prefix cache have {_share(cached)} "
            f"of their first drafts accepted, the others {_share(fresh)}: the drafter's part of "
            "the cache does not fit its weights; call /flush_cache, and serve with "
            "--disable-radix-cache if that does not last",
        )
    if not evidence.worked and not checks.has_origin:
        return Finding(
            "unknown",
            "it has been so since the start, and the drafter's directory has no origin.json to "
            "tell what it was trained with; compare target, quantisation, chat template, thinking "
            "and target_layer_ids with its training, or train a drafter with `adaspec train`",
        )
    return Finding(
        "traffic",
        "nothing about the server has changed, so traffic differs from what the drafter was "
        "trained on (language, chat template, thinking on or off, high temperatures); train on "
        "it, let the drafter learn with `adaspec serve --online`, or let `goodput` choose to "
        "draft less",
    )


def describe(evidence: Evidence) -> str:
    """What is seen, as the beginning of a sentence."""
    figures = evidence.figures
    whose = " with a cached prefix" if evidence.of_cached else ""
    text = (
        f"acceptance has collapsed: {_share(figures)} of the first drafts are accepted in "
        f"{figures.passes} passes of {figures.requests} requests{whose}"
    )
    if evidence.level is not None:
        text += f", {evidence.level:.1%} before"
    if figures.fulfilled is not None:
        text += (
            f", and {figures.fulfilled.value:.0%} of the drafts to expect by the drafter's origin"
        )
    return text


def _far_below(left: Figures, right: Figures) -> bool:
    """Beyond noise, at two standard errors; there may be few requests of a kind."""
    bound = left.first.value + 2 * left.first.error
    return bound < _FAR_BELOW * (right.first.value - 2 * right.first.error)


def _share(figures: Figures) -> str:
    return f"{figures.first.value:.1%}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
