"""The captured graphs of ragged verify passes: how many rows they have, and how a pass fits one."""

from dataclasses import dataclass, field

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from adaspec.chains import ChainRows

_Key = tuple[int, int]  # batch, width


@dataclass(frozen=True)
class RaggedGraphs:
    """Lays out passes for SGLang's ``DecodeCudaGraphRunner`` in ragged mode.

    What SGLang would compute twice a step, the layout padded to a graph's request slots, is
    computed once here, and not again for chains that are all equally long.

    Attributes:
        block_size: most tokens of a chain.
        tiers: rows of the graphs, ascending; empty without graphs.
        most_requests: that a graph holds.
    """

    block_size: int
    tiers: tuple[int, ...] = ()
    most_requests: int = 0
    _uniform: dict[_Key, tuple[torch.Tensor, RaggedVerifyLayout]] = field(default_factory=dict)

    def rows(self, batch: int, total: int) -> int:
        """Rows of the smallest graph that holds a pass, or of the pass if none does."""
        if batch > self.most_requests:
            return total
        return next((tier for tier in self.tiers if tier >= total), total)

    def lay_out(self, rows: ChainRows, columns: int) -> tuple[torch.Tensor, RaggedVerifyLayout]:
        """Where the rows of a pass come from, and SGLang's description of it.

        Args:
            columns: of the window that the chains are the first columns of.

        Returns:
            Place of every row in the flattened window, int64 ``[rows]``, -1 for padding; the
            layout, for the request slots of the graph if there is one.
        """
        if rows.lengths is not None:
            return self._make(rows, columns)
        key = (rows.batch, rows.width)
        if key not in self._uniform:
            self._uniform[key] = self._make(rows, columns)
        return self._uniform[key]

    def _make(self, rows: ChainRows, columns: int) -> tuple[torch.Tensor, RaggedVerifyLayout]:
        size = self.rows(rows.batch, rows.total)
        cells = rows.cell
        if rows.width != columns:
            cells = rows.chain * columns + rows.column
        if size > rows.total:
            cells = torch.nn.functional.pad(cells, (0, size - rows.total), value=-1)
        start = rows.start.to(torch.int32)
        lengths = rows.lengths
        if lengths is None:
            lengths = torch.full_like(start, rows.width)
        layout = RaggedVerifyLayout(
            verify_lens=lengths.to(torch.int32),
            graph_num_tokens=size,
            extend_start_loc=start,
            qo_indptr_device=torch.nn.functional.pad(start, (0, 1), value=rows.total),
        )
        if size in self.tiers and rows.batch <= self.most_requests:
            # As ``DecodeCudaGraphRunner._ragged_capture_slots`` says.
            slots = min(size, self.most_requests)
            layout = layout.padded_to_bucket(padded_bs=slots, cap=self.block_size)
        return cells, layout
