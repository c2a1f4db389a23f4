"""The tap: what prefill and verification computed, handed to the feedback relay.

The scheduler's thread selects the rows of sampled requests and starts copies; it never waits and
never reads a tensor. A thread of the relay waits for the copies, and its process does the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.feedback import (
    CaptureSink,
    EndCapture,
    HiddenTeacher,
    PrefillCapture,
    StepCapture,
    Teacher,
    TopKTeacher,
)
from sglang_patches.online.host_copies import HostCopier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_patches.worker.accept import Verdict

CONSENT = "adaspec_learn"  # key of ``custom_params``

_MAX_FOLLOWED = 8192
_LOGSUMEXP_ROWS = 256  # rows whose float32 logits exist at a time


class FeedbackTap:
    """Follows sampled requests from prefill to their end.

    Args:
        sink: told what happened.
        top_k: target logits kept for each row; None keeps its last hidden state instead.
        device: of the model.
        opt_in: follow requests only that allow it.
    """

    def __init__(
        self, sink: CaptureSink, top_k: int | None, device: torch.device, opt_in: bool = False
    ) -> None:
        self.sink = sink
        self._opt_in = opt_in
        self._top_k = top_k
        self._copier = HostCopier(device)
        self._copies_are_views = device.type == "cpu"
        self._followed: dict[str, Req] = {}
        self._chosen: list[int] = []
        self._index: Tensor | None = None  # rows of the chosen requests; None: all of them
        self._teacher: Teacher | None = None

    def after_prefill(
        self,
        reqs: "Sequence[Req]",
        starts: Sequence[int],
        lengths: Sequence[int],
        taps: Tensor,
        version: int,
    ) -> None:
        """Capture a prefill batch.

        Args:
            starts: tokens of each request before this slice, cached or prefilled.
            lengths: tokens of each request in this slice.
            taps: ``[rows, taps · hidden]``, request after request, perhaps with padding behind.
            version: live when the context K/V were written.
        """
        for rid in [rid for rid, req in self._followed.items() if req.finished()]:
            self.after_finish(rid)  # those that ended with their prefill
        chosen = [i for i, req in enumerate(reqs) if self._is_wanted(req)]
        if not chosen:
            return
        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows = torch.cat([taps[ends[i] - lengths[i] : ends[i]] for i in chosen])
        (copy,), wait = self._copier.start([rows])
        self.sink.submit(
            PrefillCapture(
                requests=[reqs[i].rid for i in chosen],
                version=version,
                token_ids=[list(reqs[i].get_fill_ids()[: starts[i] + lengths[i]]) for i in chosen],
                starts=[starts[i] for i in chosen],
                taps=copy,
                wait=wait,
            )
        )
        for i in chosen:
            self._followed[reqs[i].rid] = reqs[i]
        while len(self._followed) > _MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]

    def before_constraints(
        self,
        reqs: "Sequence[Req]",
        logits: Tensor,
        rows: ChainRows,
        states: Tensor | None = None,
    ) -> None:
        """Keep the target's own word, before penalties and masks change its logits.

        Args:
            logits: ``[rows, vocab]``.
            rows: which row belongs to which token of which chain.
            states: ``[rows, hidden]``, the target's last hidden states; needed only if they are
                what is kept.
        """
        self._choose(reqs, logits.device)
        if not self._chosen:
            return
        if self._top_k is None:
            self._teacher = HiddenTeacher(rows.expand(states, self._index).flatten(0, 1))
            return
        # [chosen · width, vocab], a view if all requests are chosen: nothing of it is kept
        chosen = rows.expand(logits, self._index).flatten(0, 1)
        top = chosen.topk(min(self._top_k, chosen.shape[1]), dim=-1)  # [chosen · width, k]
        sums = [part.float().logsumexp(-1) for part in chosen.split(_LOGSUMEXP_ROWS)]
        self._teacher = TopKTeacher(top.values, top.indices.to(torch.int32), torch.cat(sums))

    def after_verify(
        self,
        reqs: "Sequence[Req]",
        prefix_lens: Tensor,
        tokens: Tensor,
        rows: ChainRows,
        taps: Tensor,
        verdict: "Verdict",
        version: int,
    ) -> None:
        """Capture a verify step; `before_constraints` has seen the same batch.

        Args:
            prefix_lens: ``[batch]``, positions of the anchors.
            tokens: ``[batch, width]``, the verified chains; behind the end of one, anything.
            rows: which row belongs to which of them.
            taps: ``[rows, taps · hidden]``, perhaps with padding behind.
            version: that drafted.
        """
        teacher, self._teacher = self._teacher, None
        if teacher is None:
            return
        tensors = [
            self._own(self._select(prefix_lens)),
            self._select(tokens),
            self._select(verdict.commit_lens - 1),
            self._select(verdict.bonus),
            rows.expand(taps, self._index),
            *teacher.tensors(),
        ]
        if rows.lengths is not None:
            tensors.append(self._select(rows.lengths))
        copies, wait = self._copier.start(tensors)
        lengths = None if rows.lengths is None else copies.pop()
        anchors, chains, accepted, bonus, block_taps, *teacher_parts = copies
        chosen = [reqs[i] for i in self._chosen]
        self.sink.submit(
            StepCapture(
                requests=[req.rid for req in chosen],
                version=version,
                temperatures=[_temperature(req) for req in chosen],
                anchors=anchors,
                tokens=chains,
                accepted=accepted,
                bonus=bonus,
                taps=block_taps,
                teacher=type(teacher)(*teacher_parts),
                verify_lengths=lengths,
                wait=wait,
            )
        )

    def after_finish(self, rid: str) -> None:
        """A request has left the server."""
        req = self._followed.pop(rid, None)
        if req is not None:
            aborted = isinstance(req.finished_reason, FINISH_ABORT)
            length = len(req.origin_input_ids) + len(req.output_ids_through_stop)
            self.sink.submit(EndCapture(rid, length, "aborted" if aborted else "finished"))

    def _is_wanted(self, req: "Req") -> bool:
        """Sampled, not forbidden, and a request that a drafter can learn from.

        Images stand in the token ids as hashes, adapters make another target, and health checks
        are no traffic.
        """
        return (
            self.sink.wants(req.rid)
            and _consents(req.sampling_params.custom_params, self._opt_in)
            and req.multimodal_inputs is None
            and req.input_embeds is None
            and req.lora_id is None
            and not req.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        )

    def _choose(self, reqs: "Sequence[Req]", device: torch.device) -> None:
        followed, wants = self._followed, self.sink.wants
        chosen = [i for i, r in enumerate(reqs) if r.rid in followed and wants(r.rid)]
        if len(chosen) == len(reqs):
            self._index = None
        elif chosen and (chosen != self._chosen or self._index is None):
            self._index = torch.tensor(chosen).to(device, non_blocking=True)
        self._chosen = chosen

    def _select(self, rows: Tensor) -> Tensor:
        """The rows of the chosen requests."""
        return rows if self._index is None else rows.index_select(0, self._index)

    def _own(self, rows: Tensor) -> Tensor:
        """A copy of what the scheduler may write to, where `HostCopier` makes none."""
        return rows.clone() if self._copies_are_views and self._index is None else rows


def _consents(custom: dict[str, Any] | None, opt_in: bool) -> bool:
    """Whether a request may be learned from; what is neither true nor false counts as no.

    ``custom_params`` is the one field that SGLang hands through from both of its request formats
    without looking at it.
    """
    choice = custom.get(CONSENT, not opt_in) if isinstance(custom, dict) else not opt_in
    return choice is True


def _temperature(req: "Req") -> float:
    """Sampling temperature; SGLang writes greedy as ``top_k`` 1."""
    params = req.sampling_params
    return 0.0 if params.top_k == 1 else float(params.temperature)
