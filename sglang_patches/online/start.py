"""Start the online loop: what of it the configuration and the server's arguments ask for."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from adaspec.config import AdaSpecConfig, TapConfig, WatchConfig
from adaspec.drafters.checkpoint import read_tensors
from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, Endpoint, FeedbackRelay, RelayOptions, find_channel
from adaspec.versions import BASE, context_digest, lineage_of, read_manifest
from sglang_patches.checks import model_directory
from sglang_patches.online import namespace
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.alarm import start_alarm
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.last_hidden import keep_last_hidden_states
from sglang_patches.online.loop import OnlineLoop
from sglang_patches.online.served import Served
from sglang_patches.online.swap import VersionSwapper
from sglang_patches.online.tap import FeedbackTap
from sglang_patches.online.watch import AcceptanceWatch
from sglang_patches.online.weights import DraftWeights

if TYPE_CHECKING:
    from sglang_patches.online.metrics import WorkerMetrics
    from sglang_patches.worker.worker import AdaSpecWorker

logger = logging.getLogger(__name__)


def start_online(worker: "AdaSpecWorker", config: AdaSpecConfig) -> OnlineLoop | None:
    """The loop of this rank; None if there is nothing for it to do.

    The first rank of every server has one, for the alarm of collapsed acceptance.

    Raises:
        AdaSpecError: if the channel cannot be used, or versions cannot be swapped on this server.
    """
    is_first = get_parallel().tp_rank == 0
    reports = is_first and worker.server_args.enable_metrics
    if not config.channel.is_used and not is_first:
        return None
    directory = model_directory(worker.server_args.speculative_draft_model_path)
    manifest = read_manifest(directory)
    number = BASE if manifest is None else manifest.number
    if not config.channel.is_used:
        # Nothing is swapped, so nobody asks for the context.
        alone = Served(number, context_sha256="")
        metrics = _start_metrics(worker.block_size, number, None, None) if reports else None
        alarm = start_alarm(worker, alone, None, metrics)
        return OnlineLoop(alone, None, None, None, metrics, alarm)
    channel = find_channel(config.channel.directory, config.channel.address, config.channel.keys)
    lineage = lineage_of(directory)
    tensors = read_tensors(directory)
    start = Served(number, context_digest(tensors))
    if config.tap.enabled:
        namespace.refresh_prefixes(config.tap.refresh_share)
    tap = relay = metrics = None
    if config.tap.enabled and is_first:
        relay = _start_relay(config, channel, lineage)
        tap = _start_tap(config.tap, relay, worker)
    if reports:
        metrics = _start_metrics(worker.block_size, number, relay, channel.status)
    swapper = watch = None
    if config.channel.store is not None:
        swapper = _start_swapper(worker, config, channel, start, lineage, tensors, metrics)
        if config.watch.window_tokens > 0:
            watch = AcceptanceWatch(config.watch, swapper.standing)
    alarm = start_alarm(worker, start, swapper, metrics) if is_first else None
    return OnlineLoop(start, tap, swapper, watch, metrics, alarm)


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
        model_directory(worker.server_args.speculative_draft_model_path),
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
