"""What a result was measured on, to be stored beside it."""

import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

_PACKAGES = ("adaspec", "sglang", "torch", "transformers")


def machine_facts() -> dict[str, object]:
    """Hardware, software versions and the command of this process, as plain JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": psutil.getloadavg(),
        "accelerators": _accelerators(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    # Imported here: torch takes seconds, and only a written result needs it.
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
