"""The drafter's context: target features of committed tokens, written to its KV cache.

Steps that draft nothing need no context, so theirs is kept and written in one go when drafting
resumes: a few large matrix products instead of many small ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adaspec.chains import ChainRows

# What may wait; beyond it is written at once.
_MOST_PENDING_BYTES = 32 << 20


class _Pending(NamedTuple):
    """Committed tokens of one plain step: ``[batch, taps · hidden]``, ``[batch]``, ``[batch]``."""

    features: Tensor
    slots: Tensor
    positions: Tensor


class DraftContext:
    """Writes context to the draft cache, or keeps it for later.

    What is kept stays valid while its requests run. A slot can get another owner only after its
    request has left the batch, and a prefix can be reused only by a prefill; what is kept is
    written before either is seen by a pass (`catch_up`), so the cache is as if written at once.

    Args:
        append: upstream's ``_append_target_hidden_to_draft_kv_by_loc``.
        on_host: whether the tensors are in host memory, where selecting the committed rows waits
            for nothing.
    """

    def __init__(self, append: Callable[..., None], *, on_host: bool) -> None:
        self._append = append
        self._on_host = on_host
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._owners: frozenset[str] = frozenset()

    @property
    def pending_tokens(self) -> int:
        """Committed tokens whose context is not in the cache yet."""
        return sum(len(p.slots) for p in self._pending)

    def commit(
        self,
        rows: ChainRows,
        features: Tensor,
        slots: Tensor,
        positions: Tensor,
        commit_lens: Tensor,
    ) -> None:
        """Write the committed rows of a verify step.

        On a GPU the rejected rows of chains that differ in length are written, too: into their own
        slots, which belong to the draft block and hold nothing until they are committed.

        Args:
            features: ``[rows, taps · hidden]``, perhaps with padding behind.
            slots: in the draft pool's ids: int64 ``[batch, columns]`` of the window that uniform
                chains are the first columns of; ``[rows]`` of others.
            positions: int64 ``[rows]``, perhaps with padding behind, as there may be in ``slots``.
            commit_lens: int32 ``[batch]``. The anchor's row is always committed; the bonus token
                has no features yet.
        """
        positions = positions[: rows.total]
        if slots.dim() == 2:
            slots = slots[:, : rows.width]
        if not self._on_host and slots.dim() == 2:
            self._append(
                target_hidden=rows.expand(features).flatten(0, 1),
                cache_loc=slots.reshape(-1),
                cache_loc_2d=slots,
                positions=positions,
                commit_lens=commit_lens,
            )
            return
        features, slots = features[: rows.total], slots.reshape(-1)[: rows.total]
        if self._on_host:
            kept = (rows.column < rows.repeat(commit_lens)).nonzero().squeeze(1)
            features, positions, slots = (
                tensor.index_select(0, kept) for tensor in (features, positions, slots)
            )
        self._append(target_hidden=features, cache_loc=slots, positions=positions)

    def keep(
        self, requests: tuple[str, ...], features: Tensor, slots: Tensor, positions: Tensor
    ) -> None:
        """Keep the context of a step without drafts for `catch_up`.

        Args:
            requests: of the batch.
            features: ``[batch, taps · hidden]``, perhaps with padding behind.
            slots: int64 ``[batch]``; positions: int64 ``[batch]``.
        """
        features = features[: len(requests)]
        if not self._on_host:  # a CUDA graph's next replay overwrites them
            features = features.clone()
        self._pending.append(_Pending(features, slots, positions))
        self._pending_bytes += features.nbytes
        self._owners = frozenset(requests)
        if self._pending_bytes > _MOST_PENDING_BYTES:
            self.catch_up()

    def before_plain_step(self, requests: tuple[str, ...]) -> None:
        """Catch up if a request with pending context has left: its slots may get other owners."""
        if self._pending and not self._owners.issubset(requests):
            self.catch_up()

    def catch_up(self) -> int:
        """Write what was kept; the number of tokens."""
        if not self._pending:
            return 0
        features, slots, positions = (torch.cat(part) for part in zip(*self._pending, strict=True))
        self._pending.clear()
        self._pending_bytes = 0
        self._append(target_hidden=features, cache_loc=slots, positions=positions)
        return len(slots)
