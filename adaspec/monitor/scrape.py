"""One reading of a server's ``/metrics``."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from adaspec.errors import AdaSpecError

_OURS = "adaspec_"
_RUNNING = "sglang:num_running_reqs"
_QUEUED = "sglang:num_queue_reqs"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels.

    Attributes:
        time: Unix time of the reading, seconds.
        samples: as `docs/metrics.md` names them, with Prometheus's suffixes.
    """

    time: float
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: object) -> float:
        """Sum of all samples of a name that have these labels; 0 if there is none."""
        wanted = {(key, str(value)) for key, value in labels.items()}
        found = self.samples.get(name, {})
        return sum(value for have, value in found.items() if wanted <= set(have))

    def by(self, name: str, label: str, **labels: object) -> dict[str, float]:
        """Sums of the samples of a name, by the values of one of their labels."""
        wanted = {(key, str(value)) for key, value in labels.items()}
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            key = dict(have).get(label)
            if key is not None and wanted <= set(have):
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def has(self, name: str) -> bool:
        """Whether there is any sample of that name."""
        return bool(self.samples.get(name))

    @property
    def running(self) -> float:
        """Requests that run."""
        return self.total(_RUNNING)

    @property
    def queued(self) -> float:
        """Requests that wait."""
        return self.total(_QUEUED)


def parse(text: str, now: float | None = None) -> Scrape:
    """A reading from Prometheus's text format.

    Raises:
        AdaSpecError: if it is something else.
    """
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_OURS) or sample.name in (_RUNNING, _QUEUED):
                    labels = tuple(sorted(sample.labels.items()))
                    samples.setdefault(sample.name, {})[labels] = float(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise AdaSpecError(
            f"the server's /metrics is not in Prometheus's text format ({error}); give the base "
            "URL of an SGLang server."
        ) from error
    return Scrape(time.time() if now is None else now, samples)


def fetch(client: httpx.Client, url: str) -> Scrape:
    """Read a server's metrics.

    Args:
        url: its base URL.

    Raises:
        AdaSpecError: saying what to do, if it does not answer, or has no metrics of ours.
    """
    base = url.rstrip("/")
    try:
        # SGLang mounts the page with a slash behind its name.
        response = client.get(f"{base}/metrics/", follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AdaSpecError(
            f"nothing answers at {base} ({error or type(error).__name__}); start the server, or "
            "give its base URL."
        ) from error
    if response.status_code == httpx.codes.NOT_FOUND:
        raise AdaSpecError(f"{base} has no /metrics; start the server with --enable-metrics.")
    if response.status_code != httpx.codes.OK:
        raise AdaSpecError(f"{base}/metrics/ answered with status {response.status_code}.")
    scrape = parse(response.text)
    if not scrape.has("adaspec_live_version") and not scrape.has("adaspec_target_passes_total"):
        raise AdaSpecError(
            f"{base} has metrics, but none of AdaSpec's yet; serve with --speculative-algorithm "
            "ADASPEC, or send a first request."
        )
    return scrape
