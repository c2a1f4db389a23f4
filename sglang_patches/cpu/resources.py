"""What this machine, or the container around us, really has: memory and cores."""

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can still be allocated: the host's, or the control group's if that is less."""
    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_memory()
    return available if limit is None else max(0, min(available, limit - used))


def total_memory() -> int:
    """Bytes of memory of the host, or the limit of the control group if that is less."""
    total = int(psutil.virtual_memory().total)
    limit, _ = _cgroup_memory()
    return total if limit is None else min(total, limit)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut to the control group's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def default_threads(cores: int) -> int:
    """OpenMP threads for the forward pass on a machine with ``cores`` usable cores.

    One thread up to four cores. An OpenMP region ends in a barrier that spins: on a busy two-core
    machine, where the tokenizer, the detokenizer and the HTTP server need time slices too, a
    two-thread team waited for its descheduled member at each of the thousands of small operators
    of a step, and single requests stalled for many seconds; one thread never did. Above four
    cores half of them are used, which leaves the other half to those processes and to a learner.
    """
    return 1 if cores <= 4 else cores // 2


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, bytes in use that cannot be reclaimed) of the control group; limit None if unset."""
    layouts = (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (
            _CGROUP / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    )
    for folder, limit_name, used_name, reclaimable in layouts:
        limit = _read_int(folder / limit_name)
        used = _read_int(folder / used_name)
        if limit is None or used is None:
            continue
        # The kernel counts page cache as used; the inactive part of it is given back on demand.
        return limit, max(0, used - _read_stat(folder / "memory.stat", reclaimable))
    return None, 0


def _cgroup_cpu_quota() -> float | None:
    """Cores' worth of CPU time the control group grants, or None without a quota."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota_us = _read_int(_CGROUP / "cpu" / "cpu.cfs_quota_us")
        period_us = _read_int(_CGROUP / "cpu" / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and quota_us > 0 and period_us else None
    return None if quota == "max" else int(quota) / int(period)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == key), 0)
    except OSError:
        return 0
