"""The online loop inside the worker: what it does before, during and after a step."""

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from adaspec.chains import ChainRows
from adaspec.config import AdaSpecConfig, TapConfig, WatchConfig
from adaspec.drafters.checkpoint import read_tensors
from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, Endpoint, FeedbackRelay, RelayOptions, find_channel
from adaspec.verify import GoodputPolicy, StepPlan, VerifyPolicy
from adaspec.versions import BASE, context_digest, lineage_of, read_manifest
from sglang_patches.checks import model_directory
from sglang_patches.online import namespace
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.evidence import Ratio
from sglang_patches.online.last_hidden import keep_last_hidden_states
from sglang_patches.online.served import Served
from sglang_patches.online.swap import VersionSwapper
from sglang_patches.online.tap import FeedbackTap
from sglang_patches.online.watch import AcceptanceWatch
from sglang_patches.online.weights import DraftWeights

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_patches.online.metrics import WorkerMetrics
    from sglang_patches.worker.accept import Verdict
    from sglang_patches.worker.worker import AdaSpecWorker

logger = logging.getLogger(__name__)

# Under overlap scheduling a step's counts arrive while the next one runs.
_MAX_STEPS_IN_FLIGHT = 8


class _Step(NamedTuple):
    """A verify step whose counts are on their way.

    Attributes:
        drafted_by: version that drafted: the live one or, in a control window, the base.
        live: version that was live.
    """

    drafted_by: int
    live: int


class OnlineLoop:
    """Feedback, versions and the watch, called by the worker on the scheduler's thread.

    Args:
        start: the version the server started with.
        tap: None if no feedback is sent from this rank.
        swapper: None if no versions are followed.
        watch: None if nothing is watched. Every rank has one: they count the same steps, so they
            trust and give up the same versions.
        metrics: None on all ranks but the first, and without SGLang's ``--enable-metrics``.
    """

    def __init__(
        self,
        start: Served,
        tap: FeedbackTap | None,
        swapper: VersionSwapper | None,
        watch: AcceptanceWatch | None,
        metrics: "WorkerMetrics | None",
    ) -> None:
        self._start = start
        self._tap = tap
        self._swapper = swapper
        self._watch = watch
        self._metrics = metrics
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
        self._steps_in_flight.append(_Step(self.drafting, self.version))
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


def start_online(worker: "AdaSpecWorker", config: AdaSpecConfig) -> OnlineLoop | None:
    """The loop that the configuration and SGLang's ``--enable-metrics`` ask for; None if they ask
    for nothing.

    Raises:
        AdaSpecError: if the channel cannot be used, or versions cannot be swapped on this server.
    """
    reports = get_parallel().tp_rank == 0 and worker.server_args.enable_metrics
    if not config.channel.is_used and not reports:
        return None
    directory = model_directory(worker.server_args.speculative_draft_model_path)
    manifest = read_manifest(directory)
    number = BASE if manifest is None else manifest.number
    if not config.channel.is_used:
        # Nothing is swapped, so nobody asks for the context.
        alone = Served(number, context_sha256="")
        steps_only = _start_metrics(worker.block_size, number, None, None)
        return OnlineLoop(alone, None, None, None, steps_only)
    channel = find_channel(config.channel.directory, config.channel.address, config.channel.keys)
    lineage = lineage_of(directory)
    tensors = read_tensors(directory)
    start = Served(number, context_digest(tensors))
    if config.tap.enabled:
        namespace.refresh_prefixes(config.tap.refresh_share)
    tap = relay = metrics = None
    if config.tap.enabled and get_parallel().tp_rank == 0:
        relay = _start_relay(config, channel, lineage)
        tap = _start_tap(config.tap, relay, worker)
    if reports:
        metrics = _start_metrics(worker.block_size, number, relay, channel.status)
    swapper = watch = None
    if config.channel.store is not None:
        swapper = _start_swapper(worker, config, channel, start, lineage, tensors, metrics)
        if config.watch.window_tokens > 0:
            watch = AcceptanceWatch(config.watch, swapper.standing)
    return OnlineLoop(start, tap, swapper, watch, metrics)


def _start_swapper(
    worker: "AdaSpecWorker",
    config: AdaSpecConfig,
    channel: Channel,
    start: Served,
    lineage: str,
    tensors: dict[str, Tensor],
    metrics: "WorkerMetrics | None",
) -> VersionSwapper:
    weights = DraftWeights(worker.draft_model, lambda: worker.fused_kv_helper, worker.length_head)
    _refuse_what_cannot_be_swapped(weights.differences(tensors))
    control = _make_control(config.watch, weights, start, tensors)
    logger.info(
        "further sets of the drafter's weights take %.0f MB of %s",
        weights.nbytes / 1e6,
        weights.device,
    )
    swapper = VersionSwapper(
        weights,
        worker.model_runner.model,
        start,
        lineage,
        Path(str(config.channel.store)).expanduser(),
        channel.versions,
        Agreement(get_parallel().tp_group.cpu_group),
        control,
        (lambda seconds: None) if metrics is None else metrics.versions.observe_pause,
    )
    if metrics is not None:
        metrics.versions.follow(swapper)
    return swapper


def _start_metrics(
    block_size: int, version: int, relay: FeedbackRelay | None, status_endpoint: Endpoint | None
) -> "WorkerMetrics":
    # Imported here: prometheus_client looks for SGLang's directory when it is imported.
    from prometheus_client import REGISTRY

    from sglang_patches.online.metrics import WorkerMetrics

    stats = None if relay is None else relay.stats
    return WorkerMetrics(block_size, version, stats, status_endpoint, REGISTRY)


def _start_relay(config: AdaSpecConfig, channel: Channel, lineage: str) -> FeedbackRelay:
    tap = config.tap
    options = RelayOptions(
        feedback=channel.feedback,
        lineage=lineage,
        share=tap.share,
        bytes_per_second=tap.bytes_per_second,
        queue_bytes=tap.queue_bytes,
        teacher_rows=tap.teacher_rows,
        steps_per_record=tap.steps_per_record,
    )
    return FeedbackRelay(options)


def _start_tap(config: TapConfig, relay: FeedbackRelay, worker: "AdaSpecWorker") -> FeedbackTap:
    if config.teacher == "hidden":
        keep_last_hidden_states(worker.model_runner.model)
    top_k = config.top_k if config.teacher == "top-k" else None
    return FeedbackTap(relay, top_k, torch.device(worker.device), config.opt_in)


def _make_control(
    config: WatchConfig, weights: DraftWeights, start: Served, tensors: dict[str, Tensor]
) -> ControlWindows:
    """Control windows, if they are asked for and the server has started with the base."""
    share = config.control_share if config.window_tokens > 0 else 0.0
    if share and start.number != BASE:
        share = 0.0
        logger.info(
            "the server started with version %d, so there is no base to compare versions with; "
            "start it with the drafter that the learner started from to get one",
            start.number,
        )
    if share:
        weights.hold_base(tensors)
    return ControlWindows(weights, start, share)


def _refuse_what_cannot_be_swapped(differences: list[str]) -> None:
    """Only weights that are served as they lie in the checkpoint can be replaced by others.

    Raises:
        AdaSpecError: if some are not, or attention is data-parallel.
    """
    if differences:
        raise AdaSpecError(
            "the drafter's weights were converted when they were loaded "
            f"({', '.join(differences)}), so versions cannot be swapped in; serve the drafter "
            "unquantised, or leave channel.store out of the configuration."
        )
    if get_parallel().attn_dp_enabled:
        raise AdaSpecError(
            "versions cannot be swapped in under data-parallel attention, where idle ranks skip "
            "steps; leave out --enable-dp-attention, or channel.store in the configuration."
        )
