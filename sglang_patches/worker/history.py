"""Penalties inside a draft block: what each request has generated, kept on the device.

SGLang's penalizers count one token per decode step, and stock DFLASH does not consult them under
overlap scheduling. A verify step commits several tokens, and the penalty at column j depends on
the drafted tokens before it, so exact output needs the history per request and per column.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaspec.chains import ChainRows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class _Entry:
    """One penalised request: its row of the count table and its constants."""

    request: "Req"
    row: int
    stop_ids: torch.Tensor  # int64, on the device


class OutputHistory:
    """Output token counts of the requests that carry penalties or ``min_new_tokens``.

    Requests without them cost nothing. All state lives on ``device``; no method waits for it.
    The semantics are those of plain decoding without overlap scheduling: all tokens generated so
    far count (``sglang.srt.sampling.penaltylib``).
    """

    def __init__(self, vocab_size: int, device: torch.device | str):
        self._vocab_size = vocab_size
        self._device = device
        self._entries: dict[str, _Entry] = {}
        self._free_rows: list[int] = []
        # [rows, vocab + 1]; the last column collects tokens that are not committed.
        self._counts = torch.zeros((0, vocab_size + 1), dtype=torch.int32, device=device)

    @property
    def rows_reserved(self) -> int:
        """Rows of the count table, each ``4 · vocab`` bytes."""
        return self._counts.shape[0]

    def observe_prefill(self, reqs: "list[Req]", next_tokens: torch.Tensor) -> None:
        """Start (or restart) the history of a batch that was just prefilled.

        Args:
            reqs: the requests of the batch; ``output_ids`` is what they generated before it (not
                empty after a retraction).
            next_tokens: ``[batch]``, the token sampled for each; for a chunk that is not the last
                it is meaningless, and the next chunk restarts the history.
        """
        chosen = [i for i, req in enumerate(reqs) if _is_penalised(req)]
        if not chosen:
            return
        self._forget_finished()
        for i in chosen:
            entry = self._entry(reqs[i])
            counts = torch.bincount(
                torch.tensor(list(reqs[i].output_ids), dtype=torch.int64),
                minlength=self._vocab_size + 1,
            )
            self._counts[entry.row] = counts.to(torch.int32).to(self._device, non_blocking=True)
        rows = self._rows([self._entries[reqs[i].rid] for i in chosen])
        tokens = next_tokens[self._index(chosen)].to(torch.int64)  # [chosen]
        self._counts[rows, tokens] += 1

    def observe_commit(
        self, reqs: "list[Req]", committed: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        """Count the tokens a verify step committed.

        Args:
            committed: ``[batch, width]``, committed tokens first.
            commit_lens: ``[batch]``, how many of them count.
        """
        chosen = self._known(reqs)
        if not chosen:
            return
        index = self._index(chosen)
        tokens = committed[index].to(torch.int64)  # [chosen, width]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        live = columns < commit_lens[index][:, None]
        tokens = torch.where(live, tokens, self._vocab_size)
        rows = self._rows([self._entries[reqs[i].rid] for i in chosen])
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._counts.index_put_((rows[:, None].expand_as(tokens), tokens), ones, accumulate=True)

    def apply_penalties(
        self, reqs: "list[Req]", logits: torch.Tensor, tokens: torch.Tensor, layout: ChainRows
    ) -> None:
        """Penalise ``logits`` in place, column by column.

        Args:
            logits: ``[rows, vocab]``; the row of column j predicts the token after it.
            tokens: ``[batch, width]``; column 0 is the anchor, which is already counted.
            layout: of the rows.
        """
        chosen = self._known(reqs)
        if not chosen:
            return
        entries = [self._entries[reqs[i].rid] for i in chosen]
        params = [entry.request.sampling_params for entry in entries]
        index, rows = self._index(chosen), self._rows(entries)
        frequency = self._column([p.frequency_penalty for p in params])  # [chosen, 1]
        presence = self._column([p.presence_penalty for p in params])
        repetition = self._column([p.repetition_penalty for p in params])
        waiting = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        counts = self._counts[rows, : self._vocab_size].float()  # [chosen, vocab]
        generated = counts.sum(dim=1, keepdim=True)  # [chosen, 1]
        first = layout.start[index]  # [chosen]
        last = first + (layout.width if layout.lengths is None else layout.lengths[index]) - 1
        for column in range(layout.width):
            if column:
                drafted = tokens[index, column, None].to(torch.int64)
                counts.scatter_add_(1, drafted, torch.ones_like(drafted, dtype=counts.dtype))
            seen = counts > 0
            place = torch.minimum(first + column, last)  # [chosen], row of the column
            given = logits[place]  # [chosen, vocab]
            row = given.float()
            row = row - frequency * counts - presence * seen
            for i in waiting:
                stop_ids = entries[i].stop_ids
                too_short = generated[i] + column < params[i].min_new_tokens
                row[i, stop_ids] = torch.where(too_short, float("-inf"), row[i, stop_ids])
            scaled = torch.where(row < 0, row * repetition, row / repetition)
            row = torch.where(seen, scaled, row)
            row = row.to(logits.dtype)
            if layout.lengths is not None:  # shorter chains have had their last row
                row = torch.where((first + column <= last)[:, None], row, given)
            logits[place] = row

    def _known(self, reqs: "list[Req]") -> list[int]:
        return (
            [i for i, req in enumerate(reqs) if req.rid in self._entries] if self._entries else []
        )

    def _entry(self, request: "Req") -> _Entry:
        entry = self._entries.get(request.rid)
        if entry is None:
            if not self._free_rows:
                rows = self._counts.shape[0]
                grown = self._counts.new_zeros((max(8, 2 * rows), self._counts.shape[1]))
                grown[:rows] = self._counts
                self._free_rows = list(range(rows, grown.shape[0]))
                self._counts = grown
            entry = _Entry(request, self._free_rows.pop(), self._index(_stop_token_ids(request)))
            self._entries[request.rid] = entry
        return entry

    def _forget_finished(self) -> None:
        for rid in [rid for rid, entry in self._entries.items() if entry.request.finished()]:
            self._free_rows.append(self._entries.pop(rid).row)

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _rows(self, entries: list[_Entry]) -> torch.Tensor:
        return self._index([entry.row for entry in entries])

    def _column(self, values: list[float]) -> torch.Tensor:
        column = torch.tensor(values, dtype=torch.float32)[:, None]
        return column.to(self._device, non_blocking=True)


def _is_penalised(request: "Req") -> bool:
    params = request.sampling_params
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )


def _stop_token_ids(request: "Req") -> list[int]:
    """The ids ``min_new_tokens`` forbids (upstream: ``BatchedMinNewTokensPenalizer._prepare``)."""
    tokenizer = request.tokenizer
    ids = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    if tokenizer is not None:
        ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        ids.add(tokenizer.eos_token_id)
    return sorted(token for token in ids if token is not None)
