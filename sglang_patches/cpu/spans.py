"""What each request of a forward pass attends to, planned once and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_PAD_WASTE = 1.25
_PAD_FLOOR = 64


@dataclass(frozen=True)
class SpanGroup:
    """Requests that one attention call serves: equal query length, KV length padded to the longest.

    Attributes:
        rows: Query rows in the batch, ``[requests * q_len]`` int64, or a slice when contiguous.
        slots: KV slots, ``[requests * kv_len]`` int64 padded with slot 0, or a slice of the pool.
        q_len: Queries per request; they are the last positions of the request's span.
        kv_lens: Keys of each request, at most ``kv_len``.
        kv_len: Keys of the longest request.
    """

    rows: torch.Tensor | slice
    slots: torch.Tensor | slice
    q_len: int
    kv_lens: tuple[int, ...]
    kv_len: int
    _masks: dict[tuple[bool, int, int, torch.dtype], torch.Tensor | None] = field(
        default_factory=dict
    )

    def mask(
        self, *, causal: bool, window: int, heads: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Additive attention mask, ``[requests, 1, q_len * heads, kv_len]``; None if all visible.

        Args:
            causal: Whether a query is blind to later positions.
            window: Earlier positions a query sees (``RadixAttention.sliding_window_size``), or
                negative for all.
            heads: Rows per query position, one after the other: query heads of one key head.
            dtype: Of the queries; the kernel wants the mask in the same type.
        """
        key = (causal, window, heads, dtype)
        if key not in self._masks:
            mask = self._build_mask(causal, window, dtype)
            self._masks[key] = None if mask is None else mask.repeat_interleave(heads, dim=-2)
        return self._masks[key]

    def _build_mask(self, causal: bool, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        ragged = min(self.kv_lens) < self.kv_len
        if not ragged and window < 0 and (not causal or self.q_len == 1):
            return None
        lens = torch.tensor(self.kv_lens)[:, None, None]  # [requests, 1, 1]
        keys = torch.arange(self.kv_len)  # [kv_len]
        queries = lens - self.q_len + torch.arange(self.q_len)[:, None]  # [requests, q_len, 1]
        visible = (keys < lens).expand(-1, self.q_len, -1)
        if causal:
            visible = visible & (keys <= queries)
        if window >= 0:
            visible = visible & (keys >= queries - window)
        hidden = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return hidden[:, None]


def plan(
    request_rows: torch.Tensor,
    slot_table: torch.Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
) -> list[SpanGroup]:
    """Group the requests of a batch into few attention calls.

    Requests of equal query length share a call when padding to the longest of them costs at most
    a quarter more keys; a lone request whose slots are consecutive reads the pool in place.

    Args:
        request_rows: Row of each request in ``slot_table``, ``[batch]`` integer.
        slot_table: KV slot of every position, ``[requests, context]`` int32.
        q_lens: Queries of each request; its rows in the batch follow those of the one before.
        kv_lens: Keys of each request, its queries' own positions included.

    Returns:
        Groups that cover every request with at least one query.
    """
    q_starts = [0]
    for q_len in q_lens:
        q_starts.append(q_starts[-1] + q_len)
    live = [i for i, q_len in enumerate(q_lens) if q_len > 0]
    order = sorted(live, key=lambda i: (q_lens[i], kv_lens[i]))

    groups: list[SpanGroup] = []
    first = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and _fits(order[first], order[end], q_lens, kv_lens):
            continue
        # Batch order inside the group: a batch that is one group then needs no row index.
        members = sorted(order[first:end])
        groups.append(_group(members, request_rows, slot_table, q_starts, q_lens, kv_lens))
        first = end
    return groups


def _fits(shortest: int, longest: int, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
    limit = max(kv_lens[shortest] * _PAD_WASTE, kv_lens[shortest] + _PAD_FLOOR)
    return q_lens[shortest] == q_lens[longest] and kv_lens[longest] <= limit


def _group(
    members: list[int],
    request_rows: torch.Tensor,
    slot_table: torch.Tensor,
    q_starts: list[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
) -> SpanGroup:
    q_len = q_lens[members[0]]
    lens = tuple(kv_lens[i] for i in members)
    kv_len = max(lens)
    table = slot_table[request_rows[members], :kv_len].long()  # [requests, kv_len]
    if min(lens) < kv_len:
        # Positions behind a shorter request hold stale slots; slot 0 is the pool's padding slot.
        table.masked_fill_(torch.arange(kv_len) >= torch.tensor(lens)[:, None], 0)

    starts = [q_starts[i] for i in members]
    rows: torch.Tensor | slice
    if starts[-1] - starts[0] == q_len * (len(members) - 1):
        rows = slice(starts[0], starts[0] + q_len * len(members))
    else:
        rows = (torch.tensor(starts)[:, None] + torch.arange(q_len)).reshape(-1)

    slots: torch.Tensor | slice = table.reshape(-1)
    if len(members) == 1 and bool((table.diff() == 1).all()):
        begin = int(table[0, 0])
        slots = slice(begin, begin + kv_len)
    return SpanGroup(rows=rows, slots=slots, q_len=q_len, kv_lens=lens, kv_len=kv_len)
