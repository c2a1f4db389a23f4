"""How many tokens to verify: expected commits over expected time, maximised."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adaspec.verify.cost import CostCurve, CostModel
from adaspec.verify.exploration import Exploration
from adaspec.verify.forecast import AcceptanceCurve
from adaspec.verify.step import Flags, Floats, Ints, Reason, StepLoad, StepPlan, VerifyShapes

Array = NDArray[np.float64]

# A change between plain and drafted steps must promise this much; staying costs no more than it.
_SWITCH_GAIN = 1.005
_LONGER = 1.5  # drafts of an exploratory step, verified and read, against the best
# Drafts read of each block that are compared where reading takes time.
_READS = (1, 2, 3, 4, 6, 8, 11)
# A trial can matter only if the step would pay were it so many standard deviations faster.
_DOUBT = 2.0
_PLAIN_TRIALS = 8  # plain steps taken at the start when no probe has measured any


@dataclass(frozen=True)
class _Choices:
    """Totals a drafted step can verify: ``[choices]``, anchors alone first."""

    tokens: Ints
    drafts: Array  # verified per request
    work: Array  # [reads, choices], of `VerifyShapes.work`
    is_possible: Flags  # [reads, choices]
    updates: int  # of the cost model, when the curve was read
    curve: CostCurve


@dataclass(frozen=True)
class _Outlook:
    """What is expected of each total with as many drafts read as are best for it: ``[choices]``."""

    reads: Ints
    work: Array
    commits: Array
    seconds: Array


class GoodputPlanner:
    """Chooses the plan of the highest rate of committed tokens.

    Args:
        shapes: what steps are possible.
        cost: predicts their time.
        exploration_share: share of time that may be spent on exploratory steps.
        reads_log_probs: whether the drafts that are read decide which are verified.

    Attributes:
        reads: ``[reads]``, drafts read of each block that are compared, rising.
    """

    def __init__(
        self,
        shapes: VerifyShapes,
        cost: CostModel,
        exploration_share: float,
        reads_log_probs: bool = True,
    ) -> None:
        self._shapes = shapes
        every = shapes.block_size - 1
        fewer = _READS if reads_log_probs and shapes.draft_cost > 0 else ()
        self.reads = (*(read for read in fewer if read < every), every)
        self._cost = cost
        self._exploration = Exploration(exploration_share)
        self._choices: dict[int, _Choices] = {}
        self._drafts = True  # whether drafting is what looks best
        self._plain_trials = 0
        self._usual_batch = 1  # the load exploration has adapted to

    @property
    def exploration_credit(self) -> float:
        """Seconds that exploratory steps may still lose."""
        return self._exploration.credit

    def drafter_changed(self) -> None:
        """Other weights draft from now on: what was tried with the old ones says little."""
        self._exploration.restart()

    @property
    def drafting(self) -> bool:
        """Whether drafting looked best when the last step was planned."""
        return self._drafts

    def drafts_verified(self, batch: int) -> Array:
        """Drafts verified per request, for each total that can be chosen: ``[choices]``."""
        return self._choices_for(batch).drafts

    def plan(self, load: StepLoad, accepted: Array, accepted_known: bool) -> StepPlan:
        """The plan of a step.

        Without a sample of drafted steps the whole block is verified, as DFLASH does; without one
        of plain steps, some of the first steps are plain.

        Args:
            accepted: ``[reads, choices]``, expected accepted drafts per request where so many are
                read (`reads`) and verified (`drafts_verified`).
            accepted_known: whether they rest on flags; if not, the step drafts in any case.
        """
        batch = load.batch
        if not self._usual_batch / 2 < batch < self._usual_batch * 2:
            self._usual_batch = batch
            self._exploration.restart()
        choices = self._choices_for(batch)
        if not self._cost.samples(drafted=True):
            whole, every = int(choices.tokens[-1]), self.reads[-1]
            return StepPlan(load, True, whole, every, "no cost data")
        if not self._cost.samples(drafted=False) and self._plain_trials < _PLAIN_TRIALS:
            self._plain_trials += 1
            return StepPlan(load, False, batch, 0, "no cost data")
        outlook = self._outlook(load, choices, accepted)
        best = int((outlook.commits / outlook.seconds)[1:].argmax()) + 1
        if not accepted_known:
            return self._drafted(load, choices, outlook, best, "exploration")
        return self._decide(load, choices, outlook, best)

    def refine(self, plan: StepPlan, survival: Floats) -> int:
        """Tokens to verify once the drafts exist: ``survival`` is ``[batch, plan.drafts]``.

        A step that is worth what it costs at the going rate λ adds ``commits − λ · time``; with
        steps of varying quality this, not the single step's own rate, maximises the rate overall
        (renewal-reward theorem).
        """
        if plan.rate == 0.0 or plan.reason == "exploration":
            return plan.tokens
        choices = self._choices_for(plan.load.batch)
        seconds = choices.curve.seconds(plan.load.context_tokens)[self.reads.index(plan.drafts)]
        curve = AcceptanceCurve.of(survival[None], self._shapes.ragged)
        worth = plan.load.batch * (1 + curve.at(choices.drafts)) - plan.rate * seconds
        return min(int(choices.tokens[worth.argmax()]), survival.size + plan.load.batch)

    def _outlook(self, load: StepLoad, choices: _Choices, accepted: Array) -> _Outlook:
        commits = load.batch * (1 + accepted)  # [reads, choices]
        seconds = choices.curve.seconds(load.context_tokens)
        rates = np.where(choices.is_possible, commits / seconds, 0.0)
        read = rates.argmax(0)  # [choices]
        chosen = read, np.arange(len(read))
        return _Outlook(
            np.array(self.reads)[read], choices.work[chosen], commits[chosen], seconds[chosen]
        )

    def _decide(
        self,
        load: StepLoad,
        choices: _Choices,
        outlook: _Outlook,
        best: int,
    ) -> StepPlan:
        commits, seconds = outlook.commits, outlook.seconds
        padded = self._shapes.padded(load.batch, load.batch, drafted=False)
        plain_seconds = self._cost.plain_seconds(padded, load.context_tokens)
        draft_rate, plain_rate = float(commits[best] / seconds[best]), load.batch / plain_seconds
        if self._drafts:
            self._drafts = draft_rate * _SWITCH_GAIN >= plain_rate
        else:
            self._drafts = draft_rate >= plain_rate * _SWITCH_GAIN
        rate = draft_rate if self._drafts else plain_rate
        explore = self._exploration
        explore.earn(float(seconds[best]) if self._drafts else plain_seconds)

        def drafted(choice: int, reason: Reason) -> StepPlan:
            return self._drafted(load, choices, outlook, choice, reason, rate)

        if not self._drafts:
            explore.chosen("plain")
            if explore.pay("draft", float(seconds[best] - commits[best] / rate)):
                return drafted(best, "exploration")
            return StepPlan(load, False, load.batch, 0, "goodput", rate)
        explore.chosen("draft")
        if explore.is_due("plain"):
            doubt = float(self._cost.doubt(padded, np.array([padded]), drafted=False)[0])
            if plain_rate * math.exp(_DOUBT * doubt) <= rate:
                explore.skip("plain")
            elif explore.pay("plain", plain_seconds - load.batch / rate):
                return StepPlan(load, False, load.batch, 0, "exploration", rate)
            else:  # nothing else is tried until this can be afforded
                return drafted(best, "goodput")
        losses = seconds - commits / rate
        if explore.is_due("doubtful"):
            doubts = self._cost.doubt(load.batch, outlook.work, drafted=True)
            hopes = commits / seconds * np.exp(_DOUBT * doubts)
            hopes[best] = 0.0
            other = int(hopes[1:].argmax()) + 1
            if hopes[other] <= rate:
                explore.skip("doubtful")
            elif explore.pay("doubtful", float(losses[other])):
                return drafted(other, "exploration")
        longer = int(np.searchsorted(choices.drafts, _LONGER * choices.drafts[best]))
        longer = min(longer, len(choices.drafts) - 1)
        if longer > best and explore.pay("longer", float(losses[longer])):
            return drafted(longer, "exploration")
        return drafted(best, "goodput")

    def _drafted(
        self,
        load: StepLoad,
        choices: _Choices,
        outlook: _Outlook,
        choice: int,
        reason: Reason,
        rate: float = 0.0,
    ) -> StepPlan:
        read = int(outlook.reads[choice])
        if reason == "exploration":
            read = min(math.ceil(_LONGER * read), self.reads[-1])
        return StepPlan(load, True, int(choices.tokens[choice]), read, reason, rate)

    def _choices_for(self, batch: int) -> _Choices:
        choices = self._choices.get(batch)
        if choices is None:
            shapes = self._shapes
            tokens = shapes.totals(batch)
            work = np.array(
                [[shapes.work(batch, int(t), True, read) for t in tokens] for read in self.reads]
            )
            is_possible = tokens <= batch * (1 + np.array(self.reads))[:, None]
            curve = self._cost.curve(batch, work)
            choices = _Choices(
                tokens, tokens / batch - 1, work, is_possible, self._cost.updates, curve
            )
        elif choices.updates != self._cost.updates:
            curve = self._cost.curve(batch, choices.work)
            choices = replace(choices, updates=self._cost.updates, curve=curve)
        self._choices[batch] = choices
        return choices
