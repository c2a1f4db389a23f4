"""The policy that maximises committed tokens per second from what it learns while serving."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from adaspec.config import GoodputConfig
from adaspec.verify.allocation import allocate, uniform_lengths
from adaspec.verify.calibration import CalibrationReport
from adaspec.verify.cost import CostModel, CostSample, CostTable
from adaspec.verify.forecast import Forecast
from adaspec.verify.planner import GoodputPlanner
from adaspec.verify.step import (
    Allocation,
    DraftSignals,
    Floats,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyShapes,
)
from adaspec.verify.survival import GREEDY, SAMPLED, DeviceSurvival, SurvivalModel
from adaspec.verify.thrift import Thrift
from adaspec.verify.traffic import Traffic

# Fits of the acceptance before plain decoding may win. They take 40 steps: the first requests get
# beyond their first blocks, which are the hardest to draft.
_FIRST_FITS = 12


@dataclass(frozen=True)
class GoodputState:
    """What the policy knows, for metrics.

    Attributes:
        cost: the table of step times.
        greedy: calibration of the acceptance of greedy requests; sampled: of the others.
        exploration_credit: seconds that exploratory steps may still lose.
    """

    cost: CostTable
    greedy: CalibrationReport
    sampled: CalibrationReport
    exploration_credit: float


class GoodputPolicy:
    """Survival of the drafts times a live table of step times, maximised over the batch.

    `plan` chooses the number of tokens from what the same requests' drafts were like lately,
    `allocate` shares it out by what these drafts are like. Where drafts are in host memory, it also
    chooses the number anew. Not thread-safe; all calls come from the scheduler's thread.

    The decisions depend on measured times, so with tensor parallelism one rank plans and tells the
    others ``drafted`` and ``tokens``; the allocation is the same on every rank by itself.
    """

    reads_length_ratio = False

    def __init__(
        self,
        config: GoodputConfig,
        shapes: VerifyShapes,
        device: torch.device,
        has_confidence: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        drafts = shapes.block_size - 1
        self.reads_log_probs = has_confidence
        self.survival = SurvivalModel(drafts, has_confidence)
        self.cost = CostModel(shapes.block_size, shapes.max_batch)
        self._shapes = shapes
        self._device = device
        self._device_survival = DeviceSurvival(self.survival, device)
        # Without confidences a request's expected survival is known from its newest row.
        depth = {} if has_confidence else {"depth": 1}
        self._traffic = Traffic(drafts, shapes.max_batch, **depth)
        self._planner = GoodputPlanner(shapes, self.cost, config.exploration, has_confidence)
        self._forecast = Forecast(self._traffic, shapes.ragged, self._planner.reads)
        self._thrift = Thrift(config.planning, clock)
        # These hold while nothing is learned.
        self._kept: StepPlan | None = None
        self._history: tuple[tuple[str, ...], Floats] | None = None

    def plan(self, load: StepLoad) -> StepPlan:
        """See `VerifyPolicy`. A plan holds until something has been learned.

        Of steps that teach nothing in particular, as many are learned from as time allows.
        """
        with self._thrift.spending():
            plan = self._kept
            if plan is None or plan.load.requests != load.requests:
                plan = self._plan(load)
                self._kept = plan if plan.reason == "goodput" else None
            ordinary = plan.reason == "goodput" and self.survival.fits >= _FIRST_FITS
            return replace(plan, load=load, teaches=not ordinary or self._thrift.take())

    def _plan(self, load: StepLoad) -> StepPlan:
        planner, slots = self._planner, self._traffic.admit(load.requests)
        verified = planner.drafts_verified(load.batch)
        accepted = self._forecast.accepted(slots, verified, planner.drafting)
        return planner.plan(load, accepted, self.survival.fits >= _FIRST_FITS)

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        """See `VerifyPolicy`. Without log-probabilities, by position and history."""
        batch, tokens = plan.load.batch, plan.tokens
        whole = tokens == batch * self._shapes.block_size
        if (whole or not self._shapes.ragged) and not self._shapes.on_host:
            return Allocation(uniform_lengths(batch, plan.width, self._device), tokens)
        history = self._history_of(plan.load.requests)
        drafts = signals.log_probs, history, plan.load.sampled
        if not self._shapes.on_host:
            return Allocation(self._device_survival.lengths(*drafts, tokens), tokens)
        survival = self._device_survival(*drafts)
        tokens = self._planner.refine(plan, survival.numpy())
        if not self._shapes.ragged:
            return Allocation(uniform_lengths(batch, tokens // batch, self._device), tokens)
        return Allocation(allocate(survival, tokens), tokens)

    def observe(self, outcome: StepOutcome) -> None:
        """See `VerifyPolicy`. The time of every step counts; only its noting is not put off."""
        self._thrift.earn(outcome.seconds or 0.0)  # a step whose time is not known counts, too
        with self._thrift.spending():
            if outcome.seconds is not None:
                self.cost.observe(self._sample(outcome, outcome.seconds))
            if not outcome.plan.teaches:
                return
            self._kept = self._history = None
            self._learn(outcome)
        self._thrift.done()

    def _learn(self, outcome: StepOutcome) -> None:
        self.cost.learn()
        load, drafted = outcome.plan.load, outcome.plan.drafted
        if not drafted or outcome.lengths is None or outcome.accepted is None:
            return
        slots = self._traffic.find(load.requests)
        history = self._traffic.history(slots)
        confidence = outcome.log_probs
        self.survival.observe(confidence, history, load.sampled, outcome.accepted, outcome.lengths)
        self._traffic.record_flags(slots, outcome.accepted, outcome.lengths)
        survival = self.survival.survival(confidence, self._traffic.history(slots), load.sampled)
        self._traffic.record_survival(slots, survival)

    def drafter_changed(self) -> None:
        """See `VerifyPolicy`: what is known of acceptance counts for less, and is tested soon."""
        self._kept = self._history = None
        self.survival.drafter_changed()
        self._planner.drafter_changed()

    def state(self) -> GoodputState:
        """What the policy knows now."""
        return GoodputState(
            self.cost.table(),
            self.survival.report(GREEDY),
            self.survival.report(SAMPLED),
            self._planner.exploration_credit,
        )

    def probe_steps(self) -> list[tuple[int, int, bool]]:
        """Steps for a start-up probe, as (batch, tokens, drafted); results go to `cost.seed`.

        Batches are powers of 4 and the largest; tokens per request 1 (plain), then every octave.
        """
        largest = self._shapes.max_batch
        batches = [b for b in (4**i for i in range(6)) if b < largest] + [largest]
        steps = []
        for batch in batches:
            steps.append((batch, batch, False))
            totals = self._shapes.totals(batch)[1:]
            wanted = [batch * 2**i for i in range(1, 10) if 2**i < self._shapes.block_size]
            near = {int(totals[np.abs(totals - w).argmin()]) for w in wanted} | {int(totals[-1])}
            steps += [(batch, tokens, True) for tokens in sorted(near)]
        return steps

    def _history_of(self, requests: tuple[str, ...]) -> Floats:
        if self._history is None or self._history[0] != requests:
            self._history = (requests, self._traffic.history(self._traffic.find(requests)))
        return self._history[1]

    def _sample(self, outcome: StepOutcome, seconds: float) -> CostSample:
        load, plan = outcome.plan.load, outcome.plan
        work = self._shapes.work(load.batch, outcome.tokens, plan.drafted, plan.drafts)
        batch = load.batch if plan.drafted else int(work)
        return CostSample(batch, work, load.context_tokens, plan.drafted, seconds)
