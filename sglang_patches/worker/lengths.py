"""The verify length of every step: what the policy is told, asked and shown."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from adaspec.chains import ChainRows
from adaspec.verify import (
    Allocation,
    DraftSignals,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyPolicy,
    VerifyShapes,
)
from sglang_patches.worker.clock import StepClock
from sglang_patches.worker.host_ring import HostRing

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

# Under overlap scheduling a step's counts arrive while the next one runs.
_MOST_STEPS_IN_FLIGHT = 8


@dataclass
class PlannedStep:
    """A decode step, from its plan until its results have been shown to the policy.

    Attributes:
        plan: of the policy.
        tokens: verified tokens, anchors included.
        is_typical: whether its time says something about steps of its kind.
    """

    plan: StepPlan
    tokens: int = 0
    is_typical: bool = True
    # Host tensors, valid once the counts are there. Absent if nothing was drafted; there are no
    # lengths if the host knows that all are the same.
    lengths: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    length_ratio: torch.Tensor | None = None
    accepted: Sequence[int] | None = None
    seconds: float | None = None
    has_ended: bool = False  # the next step has started, so `seconds` will not change

    def host_lengths(self) -> list[int]:
        """Verify length of each request; only once the counts are there."""
        batch = self.plan.load.batch
        if self.lengths is None:
            return [self.tokens // batch] * batch
        return list(self.lengths.tolist())

    def outcome(self) -> StepOutcome:
        """What the policy learns from; only once the counts are there."""
        lengths = np.array(self.host_lengths(), dtype=np.int64)
        seconds = self.seconds if self.is_typical else None
        if not self.plan.drafted:
            return StepOutcome(self.plan, self.tokens, seconds)
        return StepOutcome(
            self.plan,
            self.tokens,
            seconds,
            lengths,
            np.array(self.accepted, dtype=np.int64),
            None if self.log_probs is None else self.log_probs.numpy().copy(),
            None if self.length_ratio is None else self.length_ratio.numpy().copy(),
        )


class VerifyLengths:
    """Carries plans, signals and outcomes between the worker and a policy.

    Steps are shown to the policy in their order, once their counts have reached the host and the
    next step has started, so that their time is known: one or two steps late.

    Args:
        policy: decides.
        shapes: what steps the policy may choose.
        device: of the draft signals.
    """

    def __init__(self, policy: VerifyPolicy, shapes: VerifyShapes, device: torch.device) -> None:
        self.policy = policy
        self.shapes = shapes
        self._ring = HostRing(device, _MOST_STEPS_IN_FLIGHT + 2, _most_bytes(shapes))
        self._clock = StepClock[PlannedStep]()
        self._steps: deque[PlannedStep] = deque()
        self._requests: tuple[str, ...] = ()
        self._sampled = np.zeros(0, dtype=np.bool_)

    def start_step(self) -> None:
        """The scheduler hands over a batch of any kind."""
        self._clock.start()

    def interrupt(self) -> None:
        """The batch is no decode step, so the time of the one before is not known."""
        if self._steps:
            self._steps[-1].has_ended = True
        self._show()

    def plan(self, batch: "ScheduleBatch") -> PlannedStep:
        """Plan the decode step that has started."""
        timed = self._clock.decode(step := PlannedStep(self.policy.plan(self._load(batch))))
        if timed is not None:
            before, before.seconds = timed
        if self._steps:
            self._steps[-1].has_ended = True
        self._show()
        step.tokens = step.plan.tokens
        self._steps.append(step)
        while len(self._steps) > _MOST_STEPS_IN_FLIGHT:
            self._steps.popleft()
        return step

    def allocate(self, step: PlannedStep, signals: DraftSignals) -> Allocation:
        """Share out the tokens of a step that drafted."""
        allocation = self.policy.allocate(step.plan, signals)
        step.tokens = allocation.tokens
        present = {"lengths": None if is_uniform(allocation, self.shapes) else allocation.lengths}
        if step.plan.teaches:
            present |= {"log_probs": signals.log_probs, "length_ratio": signals.length_ratio}
        present = {name: tensor for name, tensor in present.items() if tensor is not None}
        if not present:
            return allocation
        for name, copy in zip(present, self._ring.take(list(present.values())), strict=True):
            setattr(step, name, copy)
        return allocation

    def count(self, accepted: Sequence[int]) -> PlannedStep | None:
        """Accepted drafts of each request have reached the host.

        Returns:
            Their step: the oldest without counts; None if there is none that they fit.
        """
        step = next((step for step in self._steps if step.accepted is None), None)
        if step is None or step.plan.load.batch != len(accepted):
            logger.warning("the counts of a step do not fit the step; both are left out")
            self._steps.clear()
            return None
        step.accepted = accepted
        self._show()
        return step

    def _show(self) -> None:
        """Let the policy see the steps that are complete."""
        while self._steps and self._steps[0].has_ended and self._steps[0].accepted is not None:
            self.policy.observe(self._steps.popleft().outcome())

    def _load(self, batch: "ScheduleBatch") -> StepLoad:
        requests = tuple(req.rid for req in batch.reqs)
        if requests != self._requests:
            self._requests = requests
            self._sampled = np.array([_is_sampled(req) for req in batch.reqs], dtype=np.bool_)
        if batch.seq_lens_cpu is not None:
            context = int(batch.seq_lens_cpu.sum())
        else:
            context = sum(req.kv.kv_committed_len for req in batch.reqs)
        return StepLoad(self._requests, context, self._sampled)


def _most_bytes(shapes: VerifyShapes) -> int:
    """Of lengths, log-probabilities and length ratios, all of four bytes, and between them."""
    return 4 * shapes.max_batch * (shapes.block_size + 1) + 64


def _is_sampled(req: "Req") -> bool:
    """SGLang writes greedy as ``top_k`` 1."""
    return bool(req.sampling_params.top_k != 1)


def is_uniform(allocation: Allocation, shapes: VerifyShapes) -> bool:
    """Whether the host knows, without reading them, that all lengths are the same."""
    whole = len(allocation.lengths) * shapes.block_size
    return not shapes.ragged or allocation.tokens == whole


def chain_rows(allocation: Allocation, shapes: VerifyShapes) -> ChainRows:
    """The layout of a step's target pass; uniform wherever the host knows that it is."""
    lengths, device = allocation.lengths, allocation.lengths.device
    batch = len(lengths)
    if is_uniform(allocation, shapes):
        return ChainRows.uniform(batch, allocation.tokens // batch, device)
    if not shapes.on_host:
        return ChainRows.ragged(lengths, allocation.tokens, shapes.block_size)
    longest = int(lengths.max())
    if longest * batch == allocation.tokens:
        return ChainRows.uniform(batch, longest, device)
    return ChainRows.ragged(lengths, allocation.tokens, longest)
