"""The captured graphs of ragged verify passes: how many rows they have, and how a pass fits one."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor

from adaspec.chains import ChainRows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

_Key = tuple[int, int, int]  # batch, width, columns


@dataclass(frozen=True)
class PackedChains:
    """The rows of a verify pass, padded to the rows of a captured graph.

    Attributes:
        tokens: int64 ``[rows]``; positions: int64 ``[rows]``.
        layout: SGLang's description of chains that may differ in length; None if the pass is laid
            out by one width.
        slots: KV slot of every row, int64 ``[rows]``, 0 (the sink) for padding; None if the rows
            are the window's first columns as they lie.
        kv_plan: SGLang's plan of these slots; None if the window's own serves.
    """

    tokens: Tensor
    positions: Tensor
    layout: RaggedVerifyLayout | None
    slots: Tensor | None = None
    kv_plan: "KVLocPlan | None" = None


@dataclass(frozen=True)
class _Place:
    """Where the rows of a pass come from, ``[rows]``, and SGLang's description of it."""

    taken: Tensor  # cells of the flattened window; 0 for padding
    is_padding: Tensor | None  # bool; None if there is none
    layout: RaggedVerifyLayout


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
    _uniform: dict[_Key, _Place] = field(default_factory=dict)

    def rows(self, batch: int, total: int) -> int:
        """Rows of the smallest graph that holds a pass, or of the pass if none does."""
        if batch > self.most_requests:
            return total
        return next((tier for tier in self.tiers if tier >= total), total)

    def pack(
        self, rows: ChainRows, tokens: Tensor, positions: Tensor, slots: Tensor
    ) -> PackedChains:
        """The rows of a pass.

        Args:
            tokens: int64 ``[batch, rows.width]``.
            positions, slots: int64 ``[batch, columns]`` of the window that the chains are the first
                columns of.
        """
        if rows.lengths is not None and tokens.is_cuda:
            return self._pack_in_one_launch(rows, tokens, positions, slots)
        columns = positions.shape[1]
        place = self._place(rows, columns)
        if rows.lengths is None and place.is_padding is None:
            positions = rows.pack(positions[:, : rows.width])
            return PackedChains(rows.pack(tokens), positions, place.layout)
        if tokens.shape[1] != columns:
            tokens = torch.nn.functional.pad(tokens, (0, columns - tokens.shape[1]))
        taken = (cells.reshape(-1).index_select(0, place.taken) for cells in (positions, slots))
        row_positions, row_slots = taken
        if place.is_padding is not None:
            row_slots = row_slots.masked_fill(place.is_padding, 0)
        return PackedChains(
            tokens.reshape(-1).index_select(0, place.taken), row_positions, place.layout, row_slots
        )

    def _pack_in_one_launch(
        self, rows: ChainRows, tokens: Tensor, positions: Tensor, slots: Tensor
    ) -> PackedChains:
        from sglang_patches.worker.chain_kernels import pack_rows

        size = self.rows(rows.batch, rows.total)
        requests = self._requests(rows.batch, size)
        packed = pack_rows(rows, tokens, positions, slots, size, requests or rows.batch)
        layout = RaggedVerifyLayout(
            verify_lens=packed.lengths,
            graph_num_tokens=size,
            extend_start_loc=packed.boundaries[:-1],
            qo_indptr_device=packed.boundaries,
            cap=self.block_size if requests else None,
        )
        return PackedChains(packed.tokens, packed.positions, layout, packed.slots)

    def _requests(self, batch: int, size: int) -> int:
        """Request slots of the graph of this size (``_ragged_capture_slots``); 0 without one."""
        if size not in self.tiers or batch > self.most_requests:
            return 0
        return min(size, self.most_requests)

    def _place(self, rows: ChainRows, columns: int) -> _Place:
        if rows.lengths is not None:
            return self._make(rows, columns)
        key = (rows.batch, rows.width, columns)
        if key not in self._uniform:
            self._uniform[key] = self._make(rows, columns)
        return self._uniform[key]

    def _make(self, rows: ChainRows, columns: int) -> _Place:
        size = self.rows(rows.batch, rows.total)
        cells = rows.cell
        if rows.width != columns:
            cells = rows.chain * columns + rows.column
        is_padding = None
        if size > rows.total:
            cells = torch.nn.functional.pad(cells, (0, size - rows.total))
            is_padding = torch.arange(size, device=cells.device) >= rows.total
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
        if requests := self._requests(rows.batch, size):
            layout = layout.padded_to_bucket(padded_bs=requests, cap=self.block_size)
        return _Place(cells, is_padding, layout)
