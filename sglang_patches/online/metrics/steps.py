"""What steps commit, by the version that drafted them, and how long they take."""

import threading
import time
from collections import Counter as Tally
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from sglang_patches.online.metrics.definitions import counter, histogram, observe_many

_STEP_BUCKETS_S = (
    0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip


class Load(NamedTuple):
    """What a decode step worked on: requests, and verified tokens of all of them."""

    batch: int
    tokens: int


class StepClock:
    """Wall time between the starts of consecutive decode steps, on the scheduler's thread.

    A step starts when the scheduler hands it to the worker. Nothing waits for the device: under
    overlap scheduling the start of a step follows the end of the one before the last, so in a
    steady state the time is that of one step, on the device or the host, whichever is slower.
    Steps next to a prefill or an idle batch are left out, and so are pauses without requests.
    """

    def __init__(self) -> None:
        self._started = self._started_before = 0.0
        self._load: Load | None = None
        self._load_before: Load | None = None

    def start(self, now: float | None = None) -> None:
        """A step of any kind starts."""
        self._started_before, self._started = (
            self._started,
            time.perf_counter() if now is None else now,
        )
        self._load_before, self._load = self._load, None

    def decode(self, load: Load) -> tuple[Load, float] | None:
        """The step is a decode step; the one before with its seconds, if that was one, too."""
        self._load = load
        if self._load_before is None:
            return None
        return self._load_before, self._started - self._started_before


class StepMetrics:
    """Counts on the scheduler's thread; `write` sums up on another.

    Args:
        block_size: tokens of a draft block, the anchor included.
        registry: where the metrics are registered.
    """

    def __init__(self, block_size: int, registry: CollectorRegistry) -> None:
        self._block_size = block_size
        self._clock = StepClock()
        self._lock = threading.Lock()
        self._counts: Tally[tuple[int, int, int]] = Tally()
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

    def count(self, version: int, width: int, accepted: Sequence[int]) -> None:
        """A verify step of ``width`` tokens per request; accepted drafts of each request."""
        with self._lock:
            self._counts.update((version, width, count) for count in accepted)

    def write(self) -> None:
        """Hand what was counted since the last call to Prometheus."""
        with self._lock:
            counts, self._counts = self._counts, Tally()
            times, self._times = self._times, []
        for (version, width, accepted), requests in counts.items():
            self._write_passes(version, width, accepted, requests)
        for load, seconds in times:
            self._step_time.labels(_tier(load.batch), _tier(load.tokens)).observe(seconds)

    def _write_passes(self, version: int, width: int, accepted: int, requests: int) -> None:
        self._passes.labels(version, width).inc(requests)
        self._committed.labels(version).inc((accepted + 1) * requests)
        if width == 1:  # plain decoding: no draft pass
            return
        self._drafted.labels(version).inc((self._block_size - 1) * requests)
        self._verified.labels(version).inc((width - 1) * requests)
        self._wasted.labels(version).inc((width - 1 - accepted) * requests)
        observe_many(self._accepted_length.labels(version), accepted, requests)
        for position in range(1, accepted + 1):
            self._accepted.labels(version, position).inc(requests)


def _tier(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (count - 1).bit_length()
