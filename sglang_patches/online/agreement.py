"""The same step on every rank: tensor-parallel workers agree on what to swap, and when."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

# Steps between two rounds; a round is a reduction over the ranks' CPUs, a fraction of a millisecond
# on one host. All ranks run the same steps, so they count them alike.
ROUND_STEPS = 16

_NOTHING = -1


@dataclass(frozen=True)
class Decision:
    """What all ranks do now.

    Attributes:
        sequence: pointer sequence of the version to install, if every rank has it ready.
        roll_back: go back to the trusted weights.
    """

    sequence: int | None = None
    roll_back: bool = False


class Agreement:
    """Turns each rank's wish into one decision.

    Args:
        group: CPU process group of the tensor-parallel ranks; None for a single rank, which has
            its way at every step.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._steps = 0

    def is_due(self) -> bool:
        """Whether this step may decide; call it once each step."""
        self._steps += 1
        return self._group is None or self._steps % ROUND_STEPS == 0

    def decide(self, ready: int | None, roll_back: bool) -> Decision:
        """Exchange wishes; every rank must call it, and gets the same answer.

        Args:
            ready: pointer sequence of the version this rank could install now.
            roll_back: this rank wants to go back.
        """
        if self._group is None:
            return Decision(None if roll_back else ready, roll_back)
        sequence = _NOTHING if ready is None else ready
        votes = torch.tensor([sequence, -sequence, -int(roll_back)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, self._group)
        lowest, highest, wanted = int(votes[0]), -int(votes[1]), bool(votes[2])
        agreed = lowest == highest != _NOTHING and not wanted
        return Decision(lowest if agreed else None, wanted)
