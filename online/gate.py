"""Whether a candidate may be served: judged on feedback that it was not trained on, against
incumbent and base.
"""

from collections.abc import Sequence

import numpy as np

from adaspec.versions import Action, GateVerdict, Interval
from online.config import GateSection
from online.shadow import Walk

_RESAMPLES = 2000


def judge(
    candidate: Sequence[Walk],
    incumbent: Sequence[Walk],
    base: Sequence[Walk],
    incumbent_number: int,
    config: GateSection,
) -> GateVerdict:
    """Compare the three on the same stretches of the same requests.

    A candidate passes if it commits more tokens per target pass than the incumbent and the base and
    if neither interval reaches below the tolerance. If it does not pass and the incumbent is worse
    than the base beyond doubt, the verdict is to go back to the base.

    Args:
        candidate, incumbent, base: walks of the same requests in the same order.
    """
    requests = len(candidate)
    if requests < config.min_requests:
        nothing = Interval(estimate=0.0, low=0.0, high=0.0)
        return GateVerdict(
            action="keep",
            reason=f"only {requests} requests to judge by, {config.min_requests} are needed",
            incumbent_number=incumbent_number,
            requests=requests,
            candidate=0.0,
            incumbent=0.0,
            base=0.0,
            over_incumbent=nothing,
            over_base=nothing,
            incumbent_over_base=nothing,
            confidence=config.confidence,
        )
    over_incumbent = relative_gain(candidate, incumbent, config.confidence)
    over_base = relative_gain(candidate, base, config.confidence)
    incumbent_over_base = relative_gain(incumbent, base, config.confidence)
    action, reason = _decide(over_incumbent, over_base, incumbent_over_base, config)
    return GateVerdict(
        action=action,
        reason=reason,
        incumbent_number=incumbent_number,
        requests=requests,
        candidate=tokens_per_pass(candidate),
        incumbent=tokens_per_pass(incumbent),
        base=tokens_per_pass(base),
        over_incumbent=over_incumbent,
        over_base=over_base,
        incumbent_over_base=incumbent_over_base,
        confidence=config.confidence,
    )


def _decide(
    over_incumbent: Interval,
    over_base: Interval,
    incumbent_over_base: Interval,
    config: GateSection,
) -> tuple[Action, str]:
    gains = (over_incumbent, over_base)
    if all(gain.estimate > 0 and gain.low >= -config.tolerance for gain in gains):
        return "publish", f"commits {over_incumbent.estimate:+.1%} tokens per target pass"
    # Also when the incumbent is the base: its gain over itself is zero, never below.
    if incumbent_over_base.high < 0:
        loss = -incumbent_over_base.estimate
        return "base", f"the incumbent commits {loss:.1%} fewer tokens per pass than the base"
    worst = min(gains, key=lambda gain: (gain.estimate, gain.low))
    return "keep", (
        f"gain {worst.estimate:+.1%} with {config.confidence:.0%} interval from {worst.low:+.1%}"
    )


def tokens_per_pass(walks: Sequence[Walk]) -> float:
    """Committed tokens per target pass over all requests."""
    return sum(walk.committed for walk in walks) / max(1, sum(walk.passes for walk in walks))


def relative_gain(left: Sequence[Walk], right: Sequence[Walk], confidence: float) -> Interval:
    """Relative gain in tokens per pass of ``left`` over ``right``, with a bootstrap interval.

    Paired: requests are resampled, and each brings both of its walks. The resampling is seeded, so
    that the same walks always give the same verdict.
    """
    committed = np.array([[a.committed, b.committed] for a, b in zip(left, right, strict=True)])
    passes = np.array([[a.passes, b.passes] for a, b in zip(left, right, strict=True)])
    draws = np.random.default_rng(0).integers(len(left), size=(_RESAMPLES, len(left)))
    rates = committed[draws].sum(1) / np.maximum(passes[draws].sum(1), 1)  # [resamples, 2]
    gains = rates[:, 0] / np.maximum(rates[:, 1], 1e-9) - 1
    tail = (1 - confidence) / 2
    low, high = np.quantile(gains, [tail, 1 - tail])
    estimate = tokens_per_pass(left) / max(tokens_per_pass(right), 1e-9) - 1
    return Interval(estimate=estimate, low=float(low), high=float(high))
