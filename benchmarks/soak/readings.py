"""What is read of the processes and the server while the traffic runs, and what follows from it."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
import psutil

from adaspec.monitor import Scrape, fetch

_MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    """One look.

    Attributes:
        at: seconds since the start.
        resident: bytes of each process, by what it is.
        files: open files of each.
        queued: requests that wait in the server.
        tokens: KV slots in use, as a share.
        version: live one.
    """

    at: float
    resident: dict[str, int]
    files: dict[str, int]
    queued: float
    tokens: float
    version: int


def read(root: psutil.Process, client: httpx.Client, url: str, at: float) -> Reading:
    """Look at the server, the processes it has started, and the learner beside it."""
    resident: dict[str, int] = {}
    files: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            name, size, count = _role(process), process.memory_info().rss, process.num_fds()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        resident[name] = resident.get(name, 0) + size
        files[name] = files.get(name, 0) + count
    scrape = fetch(client, url)
    return Reading(
        at=at,
        resident=resident,
        files=files,
        queued=scrape.queued,
        tokens=_most(scrape, "sglang:token_usage"),
        version=int(scrape.total("adaspec_live_version")),
    )


def _most(scrape: Scrape, name: str) -> float:
    return max(scrape.samples.get(name, {}).values(), default=0.0)


def _role(process: psutil.Process) -> str:
    """What a process is, from its title or its command line."""
    words = " ".join(process.cmdline()) or process.name()
    for part, role in (
        ("sglang::scheduler", "scheduler"),
        ("sglang::detokenizer", "detokenizer"),
        ("relay_process", "feedback relay"),
        ("-m online", "learner"),
        ("sglang.launch_server", "HTTP server"),
        ("adaspec.cli.main serve", "adaspec serve"),
        ("resource_tracker", "resource tracker"),
    ):
        if part in words:
            return role
    return process.name()


@dataclass(frozen=True)
class Growth:
    """How the memory of a process changed after the warm-up.

    Attributes:
        first, last: MiB, medians of the first and the last tenth.
        per_hour: slope in MiB an hour.
        low, high: its 95 % interval, from blocks of readings (so that neighbouring ones, which are
            alike, do not count as independent).
    """

    process: str
    first: float
    last: float
    per_hour: float
    low: float
    high: float


def growth(readings: Sequence[Reading], warm_up_s: float) -> list[Growth]:
    """Of every process that was there all the time."""
    kept = [r for r in readings if r.at >= warm_up_s]
    names = set.intersection(*(set(r.resident) for r in kept))
    hours = np.array([r.at for r in kept]) / 3600
    tenth = max(1, len(kept) // 10)
    found = []
    for name in sorted(names):
        sizes = np.array([r.resident[name] / _MIB for r in kept])
        slope = float(np.polyfit(hours, sizes, 1)[0])
        low, high = _interval(hours, sizes)
        found.append(
            Growth(
                process=name,
                first=float(np.median(sizes[:tenth])),
                last=float(np.median(sizes[-tenth:])),
                per_hour=slope,
                low=low,
                high=high,
            )
        )
    return found


def _interval(hours: np.ndarray, sizes: np.ndarray, blocks: int = 12) -> tuple[float, float]:
    """Moving-block bootstrap of the slope's residuals."""
    slope, start = np.polyfit(hours, sizes, 1)
    residuals = sizes - (slope * hours + start)
    length = max(1, len(sizes) // blocks)
    rng = np.random.default_rng(0)
    slopes = []
    for _ in range(1000):
        starts = rng.integers(0, len(sizes) - length + 1, size=-(-len(sizes) // length))
        drawn = np.concatenate([residuals[s : s + length] for s in starts])[: len(sizes)]
        slopes.append(np.polyfit(hours, slope * hours + start + drawn, 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(low), float(high)


def as_documents(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [asdict(reading) for reading in readings]


def wait_until_idle(client: httpx.Client, url: str, seconds: float = 120.0) -> float:
    """Share of KV slots in use once nothing runs and the prefix cache is dropped."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.post(f"{url}/flush_cache", params={"timeout": 20})
        scrape = fetch(client, url)
        used = _most(scrape, "sglang:token_usage")
        if not scrape.running and not scrape.queued and used == 0:
            return 0.0
        time.sleep(1.0)
    return used
