"""Hot swap: a version that has passed every check goes live between two steps.

The follower's thread stages; the scheduler's thread copies in place on its own stream and never
waits; a third thread proves afterwards that the served weights are the published ones and that the
target has not changed.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from adaspec.versions import Arrival, Manifest, Refusal, StagedVersion, VersionFollower
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.weights import DraftWeights, sampled_checksum

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A version that is, or can be, served.

    Attributes:
        number: within the lineage.
        context_sha256: see `Manifest`.
    """

    number: int
    context_sha256: str


@dataclass(frozen=True)
class Swap:
    """A change of the live weights.

    Attributes:
        version: now live.
        before: live until now.
        rolled_back: it is a return to the trusted version.
        context_sha256: of the weights that context K/V are made of, now.
        context_changed: context K/V written before do not fit the version that is now live.
        reason: one sentence.
    """

    version: int
    before: int
    rolled_back: bool
    context_sha256: str
    context_changed: bool
    reason: str


class VersionSwapper:
    """Owns which version is served.

    Args:
        weights: of the served draft model.
        target: watched for changes, of which there must be none.
        start: the version the server started with.
        lineage, store, endpoint: see `VersionFollower`.
        agreement: among tensor-parallel ranks.
        on_pause: told the seconds of each swap, from a thread of ours.
    """

    def __init__(
        self,
        weights: DraftWeights,
        target: nn.Module,
        start: Served,
        lineage: str,
        store: Path,
        endpoint: str,
        agreement: Agreement,
        on_pause: Callable[[float], None],
    ) -> None:
        self._weights = weights
        self._target = target
        self._target_checksum = sampled_checksum(target)
        self._agreement = agreement
        self._on_pause = on_pause
        self._live = self._trusted = start
        self._staged: Manifest | None = None
        # Held by whoever touches the staged weights.
        self._staging = threading.Lock()
        self._arrival: Arrival | None = None
        self._roll_back_reason: str | None = None
        self._swaps = 0
        self._last_install: _Clock | None = None
        self.audit_failures = 0
        self._follower = VersionFollower(store, endpoint, lineage, self._stage)

    @property
    def version(self) -> int:
        """Number of the live version."""
        return self._live.number

    @property
    def trusted(self) -> int:
        """Number of the version that a roll-back restores."""
        return self._trusted.number

    def take_refusal(self) -> Refusal | None:
        """The newest version since the last call that could not be loaded, or None."""
        return self._follower.take_refusal()

    @property
    def staging_failures(self) -> int:
        """Versions that were refused."""
        return self._follower.failures

    def trust_live(self) -> None:
        """The live version has proved itself: later swaps fall back to it."""
        self._trusted = self._live

    def request_roll_back(self, reason: str) -> None:
        """Go back to the trusted version at the next step that may decide."""
        self._roll_back_reason = reason

    def between_steps(self) -> Swap | None:
        """Swap if there is something to swap; call it once before each step, on every rank."""
        self._arrival = self._follower.take() or self._arrival
        if not self._agreement.is_due():
            return None
        with _TryLock(self._staging) as owned:
            arrival = self._arrival if owned else None
            ready = self._ready(arrival)
            decision = self._agreement.decide(ready, self._roll_back_reason is not None)
            if decision.roll_back:
                return self._roll_back()
            if arrival is not None and decision.sequence is not None:
                self._arrival = None
                return self._install(arrival)
        return None

    def close(self) -> None:
        """Stop following."""
        self._follower.close()

    def _stage(self, version: StagedVersion) -> StagedVersion:
        """Load a version beside the live weights; on the follower's thread."""
        with self._staging:
            self._staged = None
            if self._last_install is not None:
                self._last_install.seconds()  # its copies have read what is overwritten now
            self._weights.stage(version.tensors)
            if self._weights.on_gpu:
                # Named, for this thread's own current device is the first GPU on every rank.
                torch.cuda.current_stream(self._weights.device).synchronize()
            self._staged = version.manifest
        return version

    def _ready(self, arrival: Arrival | None) -> int | None:
        if arrival is None:
            return None
        number = arrival.version.manifest.number
        if number == self._live.number:  # a roll-back that the learner has followed
            self._arrival = None
            return None
        # A newer version may be staged already; its arrival is about to follow.
        if self._staged is None or self._staged.number != number:
            return None
        return arrival.pointer.sequence

    def _install(self, arrival: Arrival) -> Swap:
        before, manifest = self._live, arrival.version.manifest
        clock = self._last_install = _Clock(self._weights.on_gpu)
        if before is self._trusted:
            self._weights.trust_live()
        self._weights.install_staged()
        clock.stop()
        self._live = Served(manifest.number, manifest.context_sha256)
        self._swaps += 1
        threading.Thread(
            target=self._audit,
            args=(arrival.version, self._swaps, clock),
            name="adaspec-audit",
            daemon=True,
        ).start()
        return self._describe(before, False, arrival.pointer.reason)

    def _roll_back(self) -> Swap:
        before, reason = self._live, self._roll_back_reason or "another rank asked for it"
        self._roll_back_reason = None
        self._weights.restore()
        self._live = self._trusted
        self._swaps += 1
        return self._describe(before, True, reason)

    def _describe(self, before: Served, rolled_back: bool, reason: str) -> Swap:
        swap = Swap(
            self._live.number,
            before.number,
            rolled_back,
            self._live.context_sha256,
            self._live.context_sha256 != before.context_sha256,
            reason,
        )
        word = "rolled back" if rolled_back else "swapped"
        logger.info(
            "drafter %s from version %d to %d: %s", word, before.number, swap.version, reason
        )
        return swap

    def _audit(self, version: StagedVersion, swap: int, clock: "_Clock") -> None:
        seconds = clock.seconds()
        self._on_pause(seconds)
        wrong = self._weights.differences(version.tensors)
        target_changed = sampled_checksum(self._target) != self._target_checksum
        if target_changed:
            wrong.append("the target")
        if swap != self._swaps and not target_changed:
            return  # overtaken by another swap while comparing
        number = version.manifest.number
        if wrong:
            self.audit_failures += 1
            logger.error(
                "after the swap to version %d these weights are not the published ones: %s; "
                "restart the server",
                number,
                ", ".join(wrong),
            )
        else:
            logger.info(
                "version %d is served as published, the target is unchanged; the swap took %.2f ms",
                number,
                1e3 * seconds,
            )


class _TryLock:
    """A lock taken only if it is free; the value says whether it was."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._owned = False

    def __enter__(self) -> bool:
        self._owned = self._lock.acquire(blocking=False)
        return self._owned

    def __exit__(self, *error: object) -> None:
        if self._owned:
            self._lock.release()


class _Clock:
    """Seconds that the current stream is busy with a swap, read later and elsewhere."""

    def __init__(self, on_gpu: bool) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if on_gpu:
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()
        self._started = time.perf_counter()
        self._host_seconds = 0.0

    def stop(self) -> None:
        """The swap's last operation has been issued."""
        self._host_seconds = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Time on the device, or on the host if that is longer; waits for the device."""
        if self._events is None:
            return self._host_seconds
        begin, end = self._events
        end.synchronize()
        return max(self._host_seconds, begin.elapsed_time(end) / 1e3)
