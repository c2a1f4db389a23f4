"""Which row of a target pass belongs to which token of which draft chain.

A verify pass reads one chain for each request, ``[anchor, d_1, .., d_n]``, all rows of a chain
together. If all chains are equally long, rows ``[batch · width]`` are a view of ``[batch, width]``;
if not, they are packed without gaps, and what needs a rectangle repeats the last row of a chain
behind its end.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChainRows:
    """The layout of one pass. No method waits for the device.

    Attributes:
        batch: chains.
        width: tokens of the longest chain, or a bound of it.
        total: rows of the pass, without padding.
        device: of the tensors that are laid out.
        lengths: integer ``[batch]``, tokens of each chain; None if all have ``width``.
    """

    batch: int
    width: int
    total: int
    device: torch.device
    lengths: Tensor | None = None

    @classmethod
    def uniform(cls, batch: int, width: int, device: torch.device) -> "ChainRows":
        """All chains have ``width`` tokens."""
        return cls(batch, width, batch * width, device)

    @classmethod
    def ragged(cls, lengths: Tensor, total: int, width: int) -> "ChainRows":
        """Chains of these ``lengths`` (integer ``[batch]``), which sum to ``total``."""
        return cls(len(lengths), width, total, lengths.device, lengths)

    @cached_property
    def start(self) -> Tensor:
        """int64 ``[batch]``, row of each anchor."""
        if self.lengths is None:
            return torch.arange(0, self.total, self.width, device=self.device)
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def chain(self) -> Tensor:
        """int64 ``[rows]``, the chain of each row."""
        chains = torch.arange(self.batch, device=self.device)
        repeats = self.width if self.lengths is None else self.lengths
        return chains.repeat_interleave(repeats, output_size=self.total)

    @cached_property
    def column(self) -> Tensor:
        """int64 ``[rows]``, the column of each row within its chain."""
        return torch.arange(self.total, device=self.device) - self.start[self.chain]

    @cached_property
    def is_verified(self) -> Tensor | None:
        """bool ``[batch, width − 1]``, whether a draft is within its chain; None if all are."""
        if self.lengths is None:
            return None
        drafts = torch.arange(1, self.width, device=self.device)
        return drafts < self.lengths[:, None]

    def expand(self, rows: Tensor, chains: Tensor | None = None) -> Tensor:
        """``[rows, ...]`` as ``[batch, width, ...]``; a view if all chains are equally long.

        Args:
            chains: int64, take these chains only; the result is a copy.
        """
        rows = rows[: self.total]
        if self.lengths is None:
            blocks = rows.view(self.batch, self.width, *rows.shape[1:])
            return blocks if chains is None else blocks.index_select(0, chains)
        index = self._index if chains is None else self._index.index_select(0, chains)
        return rows.index_select(0, index.reshape(-1)).view(*index.shape, *rows.shape[1:])

    def pack(self, blocks: Tensor) -> Tensor:
        """``[batch, width, ...]`` as ``[rows, ...]``, without what lies behind a chain's end."""
        flat = blocks.flatten(0, 1)
        return flat if self.lengths is None else flat.index_select(0, self.cell)

    def repeat(self, per_chain: Tensor) -> Tensor:
        """``[batch, ...]`` as ``[rows, ...]``, each repeated for the rows of its chain."""
        return per_chain.index_select(0, self.chain)

    @cached_property
    def cell(self) -> Tensor:
        """int64 ``[rows]``, place of each row in the flattened ``[batch, width]``."""
        return self.chain * self.width + self.column

    @cached_property
    def _index(self) -> Tensor:
        """int64 ``[batch, width]``, row of each column; behind the end, the last."""
        columns = torch.arange(self.width, device=self.device)
        last = self.start + self.lengths - 1 if self.lengths is not None else self.start
        return torch.minimum(self.start[:, None] + columns, last[:, None])
