"""Which version is live, how it got there, and what it gains over the frozen base."""

from typing import Protocol

from prometheus_client import CollectorRegistry

from sglang_patches.online.evidence import Ratio
from sglang_patches.online.metrics.definitions import counter, gauge, histogram

_PAUSE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class SwapTotals(Protocol):
    """What a `VersionSwapper` counts."""

    @property
    def staging_failures(self) -> int:
        """Versions that were refused."""
        ...

    @property
    def audit_failures(self) -> int:
        """Swaps after which weights were not what they should be."""
        ...


class VersionMetrics:
    """Told of swaps by the scheduler's thread, and of their pauses by the audit's.

    Args:
        live: version at the start.
        registry: where the metrics are registered.
    """

    def __init__(self, live: int, registry: CollectorRegistry) -> None:
        self._swapper: SwapTotals | None = None
        self._refused_seen = self._audits_failed_seen = 0
        self._swaps = counter(
            registry, "swaps", "Changes of the live version, by cause.", "version", "cause"
        )
        self._live = gauge(registry, "live_version", "Drafter version that is served.")
        self._live.set(live)
        self._pause = histogram(
            registry,
            "swap_pause_seconds",
            "Time a swap kept the device or the scheduler busy.",
            buckets=_PAUSE_BUCKETS_S,
        )
        self._refusals = counter(
            registry, "refused_versions", "Versions that failed a check and were not loaded."
        )
        self._failed_audits = counter(
            registry,
            "audit_failures",
            "Swaps after which the served weights or the target were not what they should be.",
        )
        self._gain = gauge(
            registry,
            "gain_over_base",
            "Committed tokens per pass over the frozen base's in control windows, less one.",
            "version",
        )
        self._gain_error = gauge(
            registry, "gain_over_base_error", "Standard error of adaspec_gain_over_base.", "version"
        )

    def follow(self, swapper: SwapTotals) -> None:
        """Repeat the swapper's totals from now on."""
        self._swapper = swapper

    def count_swap(self, version: int, rolled_back: bool) -> None:
        """Another version is live."""
        self._swaps.labels(version, "rollback" if rolled_back else "publish").inc()
        self._live.set(version)

    def observe_pause(self, seconds: float) -> None:
        """How long a swap kept the device or the scheduler busy."""
        self._pause.observe(seconds)

    def set_gain(self, version: int, gain: Ratio) -> None:
        """The live version's committed tokens per pass over the base's."""
        self._gain.labels(version).set(gain.value - 1)
        self._gain_error.labels(version).set(gain.error)

    def write(self) -> None:
        """Hand what has changed since the last call to Prometheus."""
        if self._swapper is None:
            return
        refused, failed = self._swapper.staging_failures, self._swapper.audit_failures
        self._refusals.inc(refused - self._refused_seen)
        self._failed_audits.inc(failed - self._audits_failed_seen)
        self._refused_seen, self._audits_failed_seen = refused, failed
