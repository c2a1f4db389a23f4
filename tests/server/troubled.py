"""``python -m tests.server.troubled``: the stock server with a clock and a disk that tests control.

SGLang spawns its processes, each of which imports this module again, so all of them are troubled.
"""

import hashlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

TROUBLES_VARIABLE = "ADASPEC_TEST_TROUBLES"
_CLOCK, _DISK = 0, 8  # offsets in the file
_SIZE = 16


class Troubles:
    """What is wrong now, in a file that all troubled processes have mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def make(cls, path: Path) -> "Troubles":
        """A new file that says that nothing is wrong."""
        path.write_bytes(bytes(_SIZE))
        return cls(path)

    @property
    def clock_s(self) -> float:
        """What is added to the wall clock."""
        return self._get(_CLOCK)

    @clock_s.setter
    def clock_s(self, seconds: float) -> None:
        struct.pack_into("d", self._map, _CLOCK, seconds)

    @property
    def disk_s(self) -> float:
        """How long each flush of a file to disk, and each hashing of one, takes longer."""
        return self._get(_DISK)

    @disk_s.setter
    def disk_s(self, seconds: float) -> None:
        struct.pack_into("d", self._map, _DISK, seconds)

    def _get(self, offset: int) -> float:
        value: float = struct.unpack_from("d", self._map, offset)[0]
        return value


def trouble(path: Path) -> None:
    """Let this process have the troubles in a file, from now on."""
    troubles = Troubles(path)
    clock, flush, file_digest = time.time, os.fsync, hashlib.file_digest

    def wrong_time() -> float:
        return clock() + troubles.clock_s

    def slow_flush(handle: int) -> None:
        time.sleep(troubles.disk_s)
        flush(handle)

    def slow_digest(*args: Any) -> Any:
        time.sleep(troubles.disk_s)
        return file_digest(*args)

    time.time, os.fsync, hashlib.file_digest = wrong_time, slow_flush, slow_digest


if TROUBLES_VARIABLE in os.environ and __name__ in ("__main__", "__mp_main__"):
    trouble(Path(os.environ[TROUBLES_VARIABLE]))


if __name__ == "__main__":
    from sglang.srt.managers.scheduler import run_scheduler_process

    from tests.server.instrumented import launch

    launch(run_scheduler_process)
