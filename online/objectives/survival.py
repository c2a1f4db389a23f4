"""Prefix survival: the gradient of the expected number of accepted drafts.

A draft counts only if all before it are kept. With conditional acceptances c_1, c_2, ... a block
is expected to have ``A = sum_k prod_{j <= k} c_j`` drafts accepted, and

    dA / d log c_j = sum_{k >= j} S_k,    S_k = prod_{i <= k} c_i:

position j is worth the drafts that stand or fall with it. (D-PACE weights positions by survival as
well; a fixed decay, as DFlash's ``exp(-(k - 1) / 7)``, takes every block to be alike.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from online.objectives.rows import RowLoss, Rows

_TINY = 1e-12


@dataclass(frozen=True)
class Survival:
    """``sum_j W_j * -log c_j`` with W_j = sum_{k >= j} S_k held fixed.

    Attributes:
        smoothing: S is made of ``(1 - smoothing) c + smoothing``, so that a block that begins with
            a hard draft is still learned from. At 0 the gradient is exactly that of ``-A``.
    """

    smoothing: float

    def __call__(self, rows: Rows) -> RowLoss:
        """Losses and gradient of each row."""
        chances, slope = rows.acceptance()
        worth = self.worth(chances[:, 0], rows)[:, None]
        safe = chances.clamp(min=_TINY)
        return RowLoss(-worth * safe.log(), slope.mul_(-worth / safe), torch.zeros_like(chances))

    def worth(self, chances: Tensor, rows: Rows) -> Tensor:
        """The drafts that are expected to stand or fall with each: float32 ``[rows]``.

        Args:
            chances: float32 ``[rows]``.
        """
        shape = int(rows.blocks[-1]) + 1, int(rows.places.max()) + 1
        smooth = (1 - self.smoothing) * chances + self.smoothing
        table = chances.new_zeros(shape)  # a block ends where nothing counts any more
        table[rows.blocks, rows.places] = smooth
        survival = table.cumprod(-1)
        behind = survival.flip(-1).cumsum(-1).flip(-1)
        return behind[rows.blocks, rows.places]
