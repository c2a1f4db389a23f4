"""What steps commit, by the version that drafted them, and how long they take."""

import threading
from collections import Counter as Tally
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from sglang_patches.online.metrics.definitions import counter, histogram, observe_many
from sglang_patches.worker.clock import StepClock

_STEP_BUCKETS_S = (
    0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip


class Load(NamedTuple):
    """What a decode step worked on: requests, and verified tokens of all of them."""

    batch: int
    tokens: int


class _Pass(NamedTuple):
    """One request of a verify step; see `StepMetrics.count`."""

    version: int
    length: int
    accepted: int
    drafted: bool


class StepMetrics:
    """Counts on the scheduler's thread; `write` sums up on another.

    Args:
        block_size: tokens of a draft block, the anchor included.
        registry: where the metrics are registered.
    """

    def __init__(self, block_size: int, registry: CollectorRegistry) -> None:
        self._block_size = block_size
        self._clock = StepClock[Load]()
        self._lock = threading.Lock()
        self._counts: Tally[_Pass] = Tally()
        self._times: list[tuple[Load, float]] = []
        self._passes = counter(
            registry,
            "target_passes",
            "Verify steps, counted per request.",
            "version",
            "verify_length",
        )
        self._committed = counter(
            registry, "committed_tokens", "Tokens committed, bonus tokens included.", "version"
        )
        self._accepted = counter(
            registry,
            "accepted_tokens",
            "Drafts accepted at a block position.",
            "version",
            "position",
        )
        self._drafted = counter(registry, "drafted_tokens", "Tokens drafted.", "version")
        self._verified = counter(registry, "verified_tokens", "Drafts verified.", "version")
        self._wasted = counter(
            registry, "wasted_tokens", "Drafts verified and rejected.", "version"
        )
        self._accepted_length = histogram(
            registry,
            "accepted_length",
            "Drafts accepted in a target pass with drafts, per request.",
            "version",
            buckets=range(block_size),
        )
        self._step_time = histogram(
            registry,
            "step_seconds",
            "Wall time between the starts of consecutive decode steps.",
            "batch",
            "tokens",
            buckets=_STEP_BUCKETS_S,
        )

    def start_step(self) -> None:
        """A step of any kind starts."""
        self._clock.start()

    def decode_step(self, batch: int, tokens: int) -> None:
        """The step that started last verifies so many tokens of so many requests."""
        timed = self._clock.decode(Load(batch, tokens))
        if timed is not None:
            with self._lock:
                self._times.append(timed)

    def count(
        self, version: int, lengths: Sequence[int], accepted: Sequence[int], drafted: bool
    ) -> None:
        """A verify step, ``drafted`` or plain: tokens verified, drafts accepted of each request."""
        with self._lock:
            self._counts.update(
                _Pass(version, length, count, drafted)
                for length, count in zip(lengths, accepted, strict=True)
            )

    def write(self) -> None:
        """Hand what was counted since the last call to Prometheus."""
        with self._lock:
            counts, self._counts = self._counts, Tally()
            times, self._times = self._times, []
        for each, requests in counts.items():
            self._write_passes(*each, requests)
        for load, seconds in times:
            self._step_time.labels(_tier(load.batch), _tier(load.tokens)).observe(seconds)

    def _write_passes(
        self, version: int, length: int, accepted: int, drafted: bool, requests: int
    ) -> None:
        self._passes.labels(version, length).inc(requests)
        self._committed.labels(version).inc((accepted + 1) * requests)
        if not drafted:
            return
        self._drafted.labels(version).inc((self._block_size - 1) * requests)
        self._verified.labels(version).inc((length - 1) * requests)
        self._wasted.labels(version).inc((length - 1 - accepted) * requests)
        observe_many(self._accepted_length.labels(version), accepted, requests)
        for position in range(1, accepted + 1):
            self._accepted.labels(version, position).inc(requests)


def _tier(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (count - 1).bit_length()
