"""How our metrics are declared: one prefix, and settings that suit several processes."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "adaspec_"


def counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    """A total that only grows."""
    return Counter(PREFIX + name, text, labels, registry=registry)


def gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    """A value that the scheduler's process alone sets."""
    return Gauge(PREFIX + name, text, labels, registry=registry, multiprocess_mode="mostrecent")


def histogram(
    registry: CollectorRegistry, name: str, text: str, *labels: str, buckets: Sequence[float]
) -> Histogram:
    """A distribution; ``buckets`` are upper bounds."""
    return Histogram(PREFIX + name, text, labels, registry=registry, buckets=buckets)


def observe_many(child: Histogram, value: float, count: int) -> None:
    """``child.observe(value)``, ``count`` times in one.

    prometheus_client offers no such call, and thousands of calls a second would take the
    interpreter from the scheduler. Mirrors ``Histogram.observe``.
    """
    child._sum.inc(value * count)
    child._buckets[bisect_left(child._upper_bounds, value)].inc(count)
