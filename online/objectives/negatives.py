"""Rejected drafts as negatives: what the target has just refused here becomes less likely.

Unlikelihood (arXiv 1908.04319) on the drafts that verification rejected, as Aurora (arXiv
2602.06932) uses rejected tokens. Only where the teacher's own choice is another token: on a sampled
request the best draft can be rejected by chance.
"""

from dataclasses import dataclass

from online.objectives.rows import Objective, RowLoss, Rows

# Above this probability the slope no longer grows: it would be 1 / (1 - p).
_MOST = 0.95


@dataclass(frozen=True)
class WithNegatives:
    """An objective, and ``weight * -log(1 - p(rejected))`` where a draft was rejected."""

    objective: Objective
    weight: float

    def __call__(self, rows: Rows) -> RowLoss:
        """Losses and gradient of each row."""
        losses, slopes, divergences = self.objective(rows)
        is_negative = (rows.rejected >= 0) & (rows.rejected != rows.labels)
        index = rows.rejected.clamp(min=0)
        chance = rows.probs.gather(1, index)
        rest = 1 - chance.clamp(max=_MOST)
        # d -log(1 - p_d) / dz = p_d / (1 - p_d) (onehot(d) - p)
        pull = self.weight * is_negative * chance / rest
        slopes.sub_(pull * rows.probs).scatter_add_(1, index, pull)
        return RowLoss(losses - self.weight * is_negative * rest.log(), slopes, divergences)
