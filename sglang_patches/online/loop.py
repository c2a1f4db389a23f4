"""The online loop inside the worker: what it does before, during and after a step."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.verify import GoodputPolicy, StepPlan, VerifyPolicy
from sglang_patches.online import namespace
from sglang_patches.online.alarm import CollapseAlarm
from sglang_patches.online.collapse import SeenRequest
from sglang_patches.online.evidence import Ratio
from sglang_patches.online.served import Served
from sglang_patches.online.swap import VersionSwapper
from sglang_patches.online.tap import FeedbackTap
from sglang_patches.online.watch import AcceptanceWatch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_patches.online.metrics import WorkerMetrics
    from sglang_patches.worker.accept import Verdict

logger = logging.getLogger(__name__)

# Under overlap scheduling a step's counts arrive while the next one runs.
_MAX_STEPS_IN_FLIGHT = 8


class _Step(NamedTuple):
    """A verify step whose counts are on their way.

    Attributes:
        drafted_by: version that drafted: the live one or, in a control window, the base.
        live: version that was live.
        seen: its requests, for the alarm; None if that leaves it out.
    """

    drafted_by: int
    live: int
    seen: tuple[SeenRequest, ...] | None


class OnlineLoop:
    """Feedback, versions, the watch and the alarm, called by the worker on the scheduler's thread.

    Args:
        start: the version the server started with.
        tap: None if no feedback is sent from this rank.
        swapper: None if no versions are followed.
        watch: None if nothing is watched. Every rank has one: they count the same steps, so they
            trust and give up the same versions.
        metrics: None on all ranks but the first, and without SGLang's ``--enable-metrics``.
        alarm: None on all ranks but the first.
    """

    def __init__(
        self,
        start: Served,
        tap: FeedbackTap | None,
        swapper: VersionSwapper | None,
        watch: AcceptanceWatch | None,
        metrics: "WorkerMetrics | None",
        alarm: CollapseAlarm | None = None,
    ) -> None:
        self._start = start
        self._tap = tap
        self._swapper = swapper
        self._watch = watch
        self._metrics = metrics
        self._alarm = alarm
        self._told_gain: Ratio | None = None
        self._prefill_taps: Tensor | None = None
        self._steps_in_flight: deque[_Step] = deque(maxlen=_MAX_STEPS_IN_FLIGHT)

    @property
    def version(self) -> int:
        """Number of the live version."""
        return self._start.number if self._swapper is None else self._swapper.version

    @property
    def drafting(self) -> int:
        """Number of the version that drafts: the live one or, in a control window, the base."""
        return self._start.number if self._swapper is None else self._swapper.drafting

    def before_step(self) -> bool:
        """Swap, or open or close a control window. Every rank calls it before every step.

        Returns:
            Whether another version is live from now on.
        """
        if self._metrics is not None:
            self._metrics.steps.start_step()
        if self._swapper is None:
            return False
        swap = self._swapper.between_steps()
        refusal = self._swapper.take_refusal()
        if refusal is not None and refusal.number != self.version and self._tap is not None:
            self._tap.sink.report_rollback(refusal.number, self.version, refusal.reason, "refusal")
        if swap is None:
            return False
        if swap.context_changed:
            first = swap.context_sha256 == self._start.context_sha256
            namespace.use_context(None if first else swap.context_sha256)
        if self._metrics is not None:
            self._metrics.versions.count_swap(swap.version, swap.rolled_back)
        if self._alarm is not None:
            self._alarm.drafter_changed()
        if self._watch is not None:
            self._watch.swapped(swap.rolled_back, self._swapper.standing)
        if self._watch is None or not self._watch.on_trial:
            self._swapper.trust_live()
        if swap.rolled_back and self._tap is not None:
            self._tap.sink.report_rollback(swap.before, swap.version, swap.reason)
        return True

    def see_prefill_taps(self, taps: Tensor) -> None:
        """Target features of a prefill, ``[rows, taps · hidden]``; kept until `after_prefill`."""
        if self._tap is not None:
            self._prefill_taps = taps

    def after_prefill(self, batch: "ScheduleBatch") -> None:
        """A prefill batch has run."""
        taps, self._prefill_taps = self._prefill_taps, None
        if self._tap is not None and taps is not None:
            self._tap.after_prefill(
                batch.reqs, batch.prefix_lens, batch.extend_lens, taps, self.version
            )

    def before_constraints(
        self, reqs: "Sequence[Req]", output: "LogitsProcessorOutput", rows: ChainRows
    ) -> None:
        """What the target said in a verify step; see `FeedbackTap.before_constraints`."""
        if self._tap is not None:
            self._tap.before_constraints(
                reqs, output.next_token_logits, rows, output.last_hidden_states
            )

    def after_verify(
        self,
        reqs: "Sequence[Req]",
        prefix_lens: Tensor,
        tokens: Tensor,
        rows: ChainRows,
        taps: Tensor,
        verdict: "Verdict",
    ) -> None:
        """A verify step has been judged; see `FeedbackTap.after_verify`."""
        seen = None
        if self._alarm is not None and rows.width > 1:
            seen = self._alarm.look(reqs)
        self._steps_in_flight.append(_Step(self.drafting, self.version, seen))
        if self._swapper is not None and rows.width > 1:
            self._swapper.count_draft()
        if self._metrics is not None:
            self._metrics.steps.decode_step(rows.batch, rows.total)
        if self._tap is not None:
            self._tap.after_verify(reqs, prefix_lens, tokens, rows, taps, verdict, self.drafting)

    def after_counts(self, accepted: Sequence[int], lengths: Sequence[int], drafted: bool) -> None:
        """What became of the oldest step in flight has reached the host.

        Args:
            accepted: drafts accepted of each request.
            lengths: tokens verified of each request.
            drafted: whether the step had a draft pass.
        """
        if not self._steps_in_flight:
            return
        step = self._steps_in_flight.popleft()
        if self._metrics is not None:
            self._metrics.steps.count(step.drafted_by, lengths, accepted, drafted)
        if self._alarm is not None and step.seen is not None and step.live == self.version:
            self._alarm.count(step.seen, accepted, lengths, step.drafted_by != step.live)
        # Steps without drafts say nothing about a version.
        if self._watch is None or self._swapper is None or step.live != self.version:
            return
        if max(lengths) == 1:
            return
        committed = sum(accepted) + len(accepted)
        outcome = self._watch.observe(committed, len(accepted), step.drafted_by != step.live)
        gain = self._watch.gain
        if self._metrics is not None and gain is not None and gain is not self._told_gain:
            self._told_gain = gain
            self._metrics.versions.set_gain(step.live, gain)
        if outcome is None:
            return
        logger.info(
            "version %d %s: %s",
            step.live,
            "is given up" if outcome.roll_back else "stays",
            outcome.reason,
        )
        if outcome.roll_back:
            self._swapper.request_roll_back(outcome.reason)
        else:
            self._swapper.trust_live()

    def after_plan(self, plan: StepPlan, policy: VerifyPolicy) -> None:
        """A decode step was planned by this policy."""
        if self._metrics is None:
            return
        self._metrics.verify.count(plan.reason, plan.drafted)
        if isinstance(policy, GoodputPolicy) and self._metrics.verify.wants_state():
            self._metrics.verify.show(policy.state())

    def after_finish(self, rid: str) -> None:
        """A request has left the server."""
        if self._tap is not None:
            self._tap.after_finish(rid)
