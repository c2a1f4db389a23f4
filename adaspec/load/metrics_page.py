"""What a server tells of itself, kept beside the figures of a benchmark."""

from pathlib import Path

import httpx


def keep_metrics(url: str, path: Path, prefix: str = "adaspec_") -> None:
    """Write the samples of a server's ``/metrics`` whose names begin with ``prefix``.

    Nothing is written if it has none: it does not speculate, or runs without ``--enable-metrics``.

    Raises:
        httpx.HTTPError: if nothing answers.
    """
    reply = httpx.get(f"{url}/metrics", timeout=10.0)
    samples = [line for line in reply.text.splitlines() if line.startswith(prefix)]
    if reply.is_success and samples:
        path.write_text("\n".join(samples) + "\n")
