"""Putting requests together again from their records.

What cannot be rebuilt exactly is not used: after a gap the rest of a request is dropped, and a
request whose cached prefix is unknown is dropped whole. What came before a gap is kept.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaspec.drafters.config import DrafterConfig
from adaspec.feedback import BlockRecord, ContextRecord, EndRecord, HiddenTeacher, Teacher
from adaspec.feedback.record import concatenate_teachers
from online.config import IntakeSection
from online.prefix_store import PrefixStore
from online.target import TargetMatrices
from online.trajectory import DraftedBlock, Trajectory

RequestRecord = ContextRecord | BlockRecord | EndRecord

# Far beyond any activation or logit, and small enough to be computed with in float32: one
# trajectory whose loss overflows would cost every step that draws it.
_LARGEST_VALUE = 1e9


@dataclass
class _OpenRequest:
    """A request in the making; `tokens` may be one longer than the tap rows (the bonus token)."""

    next_number: int = 0
    tokens: list[int] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    rows: int = 0
    prompt_length: int = 0
    teacher: list[Teacher] = field(default_factory=list)
    blocks: list[DraftedBlock] = field(default_factory=list)
    temperature: float = 0.0
    nbytes: int = 0


class Assembler:
    """Turns records, in the order of their arrival, into trajectories.

    Attributes:
        counters: ``completed`` trajectories and what was lost: ``gaps`` (a record was missing),
            ``orphans`` (records of unknown requests), ``unknown-prefixes`` (requests), ``misfits``
            (records that contradict the drafter or their own request), ``evicted``, ``short`` and
            ``too-long`` (requests), ``restarted`` (requests that the server retracted).

    Args:
        max_context: positions that are used of a trajectory; a request whose response begins behind
            them is dropped. None: all are.
    """

    def __init__(
        self,
        config: IntakeSection,
        drafter: DrafterConfig,
        target: TargetMatrices,
        max_context: int | None = None,
    ) -> None:
        self._capacity = config.open_bytes
        self._top_k = config.top_k
        self._max_context = max_context
        self._drafter = drafter
        self._target = target
        self._prefixes = PrefixStore(config.prefix_bytes)
        self._open: OrderedDict[str, _OpenRequest] = OrderedDict()
        self._open_bytes = 0
        self.counters: Counter[str] = Counter()

    def add(self, record: RequestRecord) -> list[Trajectory]:
        """Take a record; the trajectories it completes, usually none or one."""
        request = record.request
        state = self._open.get(request)
        if record.number == 0 and isinstance(record, ContextRecord):
            # A new request under an old id: the server was restarted.
            finished = self._close(request, "gaps") if state is not None else []
            self._begin(record)
            return finished + self._evict()
        if state is None:
            self.counters["orphans"] += 1
            return []
        if record.number != state.next_number:
            return self._close(request, "gaps")
        state.next_number += 1
        self._open.move_to_end(request)
        if isinstance(record, EndRecord):
            return self._close(request, "completed", record.length)
        if isinstance(record, ContextRecord) and state.blocks:
            return self._close(request, "restarted")
        if not self._fits(record) or not self._follows(state, record):
            return self._close(request, "misfits")
        if isinstance(record, ContextRecord):
            self._extend_context(state, record)
        else:
            self._extend_blocks(state, record)
        return self._evict()

    def _begin(self, record: ContextRecord) -> None:
        if not self._fits(record):
            self.counters["misfits"] += 1
            return
        state = _OpenRequest(next_number=1)
        if record.start:
            cached = self._prefixes.lookup(record.token_ids[: record.start].tolist())
            if cached is None or cached.dtype != record.taps.dtype:
                self.counters["unknown-prefixes"] += 1
                return
            state.taps.append(cached)
            state.rows = record.start
            self._grow(state, cached.nbytes)
        self._open[record.request] = state
        self._extend_context(state, record)

    def _extend_context(self, state: _OpenRequest, record: ContextRecord) -> None:
        state.tokens = record.token_ids.tolist()
        state.taps.append(record.taps)
        state.rows += record.taps.shape[0]
        self._grow(state, record.taps.nbytes)
        # Now, not at the end: requests that run at the same time share their first tokens.
        self._prefixes.insert(state.tokens, torch.cat(state.taps))

    def _extend_blocks(self, state: _OpenRequest, record: BlockRecord) -> None:
        if not state.blocks:
            state.prompt_length = record.start
            state.temperature = record.temperature
        state.tokens[state.rows :] = record.token_ids.tolist()
        state.taps.append(record.taps)
        state.rows += record.taps.shape[0]
        teacher = record.committed_teacher()
        state.teacher.append(teacher)
        state.blocks += [
            DraftedBlock(
                anchor,
                accepted,
                length,
                record.version,
                int(drafts[accepted]) if accepted < length - 1 else -1,
            )
            for anchor, length, accepted, drafts in record.steps()
        ]
        self._grow(state, record.taps.nbytes + teacher.nbytes)

    def _fits(self, record: ContextRecord | BlockRecord) -> bool:
        """Whether the record is about this drafter and holds no nonsense."""
        drafter = self._drafter
        if record.taps.shape[1] != drafter.context_width:
            return False
        if int(record.token_ids.max()) >= drafter.vocab_size:
            return False
        if not _is_sane(record.taps):
            return False
        if isinstance(record, ContextRecord):
            return True
        teacher = record.teacher
        if isinstance(teacher, HiddenTeacher):
            right_width = teacher.states.shape[1] == drafter.hidden_size
            return right_width and _is_sane(teacher.states)
        return (
            int(teacher.token_ids.max()) < drafter.vocab_size
            and _is_sane(teacher.logits)
            and _is_sane(teacher.logsumexp)
        )

    def _follows(self, state: _OpenRequest, record: ContextRecord | BlockRecord) -> bool:
        """Whether the record continues the request exactly where it stands."""
        if record.start != state.rows or record.taps.dtype != state.taps[0].dtype:
            return False
        if isinstance(record, ContextRecord):
            return state.tokens == record.token_ids[: record.start].tolist()
        if state.teacher and _form(state.teacher[0]) != _form(record.teacher):
            return False
        known = state.tokens[state.rows :]
        return known == record.token_ids[: len(known)].tolist()

    def _close(self, request: str, counter: str, length: int | None = None) -> list[Trajectory]:
        state = self._open.pop(request)
        self._open_bytes -= state.nbytes
        self.counters[counter] += 1
        rows = state.rows if length is None else min(state.rows, length)
        if not state.blocks or rows <= state.prompt_length:
            self.counters["short"] += 1
            return []
        taps = torch.cat(state.taps)[:rows]
        self._prefixes.insert(state.tokens, taps)
        if self._max_context is not None and state.prompt_length >= self._max_context:
            self.counters["too-long"] += 1
            return []
        responded = slice(0, rows - state.prompt_length)
        teacher = concatenate_teachers(state.teacher).select(responded)
        if self._top_k and isinstance(teacher, HiddenTeacher):
            teacher = self._target.condense(teacher, self._top_k)
        return [
            Trajectory(
                request,
                torch.tensor(state.tokens[: rows + 1 if length is None else length]),
                taps,
                state.prompt_length,
                teacher,
                self._target.teacher_tokens(teacher),
                tuple(block for block in state.blocks if block.anchor < rows),
                state.temperature,
            )
        ]

    def _grow(self, state: _OpenRequest, nbytes: int) -> None:
        state.nbytes += nbytes
        self._open_bytes += nbytes

    def _evict(self) -> list[Trajectory]:
        finished: list[Trajectory] = []
        while self._open_bytes > self._capacity:
            finished += self._close(next(iter(self._open)), "evicted")
        return finished


def _is_sane(values: Tensor) -> bool:
    """Whether every value is a number of a size that a model computes; NaN is not."""
    return bool(values.abs().max() <= _LARGEST_VALUE)


def _form(teacher: Teacher) -> tuple[str, int, torch.dtype]:
    """What must agree between teachers that are joined."""
    if isinstance(teacher, HiddenTeacher):
        return "hidden", teacher.states.shape[1], teacher.states.dtype
    return "top-k", teacher.logits.shape[1], teacher.logits.dtype
