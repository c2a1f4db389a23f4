"""Hot swap: a version that has passed every check goes live between two steps.

The follower's thread stages; the scheduler's thread copies in place on its own stream and never
waits; a third thread proves afterwards that the served weights are the published ones and that the
target has not changed.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from adaspec.drafters.checkpoint import read_tensors
from adaspec.feedback import Endpoint
from adaspec.versions import Arrival, Manifest, Refusal, StagedVersion, VersionFollower
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.clock import StreamClock
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.served import Served, Standing, Swap
from sglang_patches.online.weights import DraftWeights, sampled_checksums

logger = logging.getLogger(__name__)

_AUDIT_RETRY_S = 0.05


class VersionSwapper:
    """Owns which version is served.

    Args:
        weights: of the served draft model.
        target: watched for changes, of which there must be none.
        start: the version the server started with.
        drafter: directory that it was loaded from.
        lineage, store, endpoint: see `VersionFollower`.
        agreement: among tensor-parallel ranks.
        control: windows that draft with the base.
        on_pause: told the seconds of each swap, from a thread of ours.
    """

    def __init__(
        self,
        weights: DraftWeights,
        target: nn.Module,
        start: Served,
        drafter: Path,
        lineage: str,
        store: Path,
        endpoint: Endpoint,
        agreement: Agreement,
        control: ControlWindows,
        on_pause: Callable[[float], None],
    ) -> None:
        self._weights = weights
        self._target = target
        self._target_checksums = sampled_checksums(target)
        self._drafter = drafter
        self._agreement = agreement
        self._control = control
        self._on_pause = on_pause
        self._start = self._live = self._trusted = start
        self._staged: Manifest | None = None
        # Held by whoever touches the staged weights.
        self._staging = threading.Lock()
        self._arrival: Arrival | None = None
        self._roll_back_reason: str | None = None
        self._swaps = 0
        self._closed = threading.Event()
        self._last_install: StreamClock | None = None
        self.audit_failures = 0
        self._follower = VersionFollower(store, endpoint, lineage, self._stage)

    @property
    def version(self) -> int:
        """Number of the live version."""
        return self._live.number

    @property
    def drafting(self) -> int:
        """Number of the version that drafts now: the live one or, in a control window, the base."""
        return self._control.base.number if self._control.is_open else self._live.number

    @property
    def standing(self) -> Standing:
        """What the live version can be compared with."""
        return self._control.standing

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
        """Go back at the next step that may decide: to the trusted version or, if that is the live
        one and has lost to the base in control windows, to the base.
        """
        self._roll_back_reason = reason

    def count_draft(self) -> None:
        """A step with a draft pass has run; call it on every rank."""
        self._control.count_draft()

    def between_steps(self) -> Swap | None:
        """Swap if there is something to swap, open or close a control window if it is time to.

        Call it once before each step, on every rank.
        """
        swap = self._decide()
        self._control.before_step()
        return swap

    def _decide(self) -> Swap | None:
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

    def differences(self) -> list[str] | None:
        """Names of served weights that are not those of the live version's files.

        Waits for the device and for control windows; from any thread but the scheduler's.

        Returns:
            None if another version has become live meanwhile.

        Raises:
            AdaSpecError: if the files cannot be read.
        """
        number, swap = self.version, self._swaps
        wrong = self._differences(self._read(number), swap)
        return wrong if number == self.version else None

    def _read(self, number: int) -> Mapping[str, Tensor]:
        if number == self._start.number:
            return read_tensors(self._drafter)
        return self._follower.stage(number).tensors

    def close(self) -> None:
        """Stop following."""
        self._closed.set()
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
        manifest = arrival.version.manifest
        self._control.close()
        self._swaps += 1
        clock = self._last_install = StreamClock(self._weights.on_gpu)
        if self._live is self._trusted:
            self._weights.trust_live()
        self._weights.install_staged()
        clock.stop()
        swap = self._go_on_with(
            Served(manifest.number, manifest.context_sha256), False, arrival.pointer.reason
        )
        threading.Thread(
            target=self._audit,
            args=(arrival.version, self._swaps, clock),
            name="adaspec-audit",
            daemon=True,
        ).start()
        return swap

    def _roll_back(self) -> Swap | None:
        reason = self._roll_back_reason or "another rank asked for it"
        self._roll_back_reason = None
        if self._live is self._trusted and self.standing != "controlled":
            return None
        self._control.close()
        self._swaps += 1
        if self._live is self._trusted:
            self._weights.restore_base()
            self._trusted = self._control.base
        else:
            self._weights.restore()
        return self._go_on_with(self._trusted, True, reason)

    def _go_on_with(self, live: Served, rolled_back: bool, reason: str) -> Swap:
        """The weights of ``live`` are in place."""
        before, self._live = self._live, live
        self._control.follow(live)
        swap = Swap(
            live.number,
            before.number,
            rolled_back,
            live.context_sha256,
            live.context_sha256 != before.context_sha256,
            reason,
        )
        word = "rolled back" if rolled_back else "swapped"
        logger.info(
            "drafter %s from version %d to %d: %s", word, before.number, live.number, reason
        )
        return swap

    def _audit(self, version: StagedVersion, swap: int, clock: "StreamClock") -> None:
        seconds = clock.seconds()
        self._on_pause(seconds)
        wrong = self._differences(version.tensors, swap)
        target_changed = sampled_checksums(self._target) != self._target_checksums
        if wrong is None and not target_changed:
            return
        wrong = (wrong or []) + ["the target"] * target_changed
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

    def _differences(self, tensors: Mapping[str, Tensor], swap: int) -> list[str] | None:
        """Served weights that are not these; None if another swap was faster."""
        wrong = []
        for name, is_right in self._weights.checks(tensors).items():
            # One by one: a large drafter as a whole takes longer than the steps between windows.
            found = self._check_between_windows(is_right, swap)
            if found is None:
                return None
            if not found:
                wrong.append(name)
        return wrong

    def _check_between_windows(self, is_right: Callable[[], bool], swap: int) -> bool | None:
        """The answer, with no control window open meanwhile; None if another swap was faster."""
        while swap == self._swaps and not self._closed.is_set():
            exchanges = self._control.exchanges
            if not self._control.is_open:
                self._control.wait()
                found = is_right()
                if swap == self._swaps and exchanges == self._control.exchanges:
                    return found
            self._closed.wait(_AUDIT_RETRY_S)
        return None


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
