"""Whether acceptance has collapsed, and why."""

from prometheus_client import CollectorRegistry

from sglang_patches.online.metrics.definitions import gauge


class CollapseMetrics:
    """One series for each cause there ever was.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._causes: set[str] = set()
        self._collapse = gauge(
            registry,
            "collapse",
            "1 while acceptance is far under expectation, by the cause the server found.",
            "cause",
        )

    def show(self, cause: str | None) -> None:
        """Acceptance has collapsed for this cause or, if it is None, is all right; any thread."""
        if cause is not None:
            self._causes.add(cause)
        for known in self._causes:
            self._collapse.labels(known).set(known == cause)
