"""What a run says: gain over static, regret, time to recover, forgetting."""

from collections.abc import Mapping, Sequence

from adaspec.versions import Interval
from online.gate import relative_gain, tokens_per_pass
from online.shadow import Walk

# Share of the final gain at which a shift counts as recovered from.
_RECOVERED = 0.8
_CONFIDENCE = 0.95


def gain(ours: Sequence[Walk], static: Sequence[Walk]) -> Interval:
    """Relative gain in tokens per pass on the same requests, with its paired interval of 95 %."""
    return relative_gain(ours, static, _CONFIDENCE)


def regret(
    ours: Mapping[str, Sequence[Walk]], checkpoints: Sequence[Mapping[str, Sequence[Walk]]]
) -> float:
    """Dynamic regret: target passes per thousand tokens that were needed beyond those of the best
    fixed checkpoint of each phase, known in hindsight only.

    Args:
        ours: walks by phase.
        checkpoints: the same of each fixed checkpoint.
    """
    beyond = tokens = 0.0
    for phase, walks in ours.items():
        committed = sum(walk.committed for walk in walks)
        best = max(tokens_per_pass(checkpoint[phase]) for checkpoint in checkpoints)
        beyond += sum(walk.passes for walk in walks) - committed / best
        tokens += committed
    return 1000 * beyond / tokens


def requests_to_recover(ours: Sequence[Walk], static: Sequence[Walk], chunk: int) -> int | None:
    """Requests of a phase until a chunk's gain reaches four fifths of the phase's last third.

    None if the last third shows no gain.
    """
    third = max(chunk, len(ours) // 3)
    final = gain(ours[-third:], static[-third:])
    if final.low <= 0:
        return None
    for start in range(0, len(ours), chunk):
        piece = slice(start, start + chunk)
        if gain(ours[piece], static[piece]).estimate >= _RECOVERED * final.estimate:
            return start
    return len(ours)
