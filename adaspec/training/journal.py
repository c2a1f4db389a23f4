"""The training log: JSON lines, and TensorBoard if wanted."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from adaspec.errors import AdaSpecError


class Journal:
    """Appends one JSON object a line; scalars go to TensorBoard too."""

    def __init__(self, path: Path, resume_step: int = 0, tensorboard: bool = False) -> None:
        """Open the log, dropping lines of steps after ``resume_step``, which will run again.

        A line that a crash cut short is dropped too.

        Raises:
            AdaSpecError: if TensorBoard is wanted and not installed.
        """
        kept = b""
        if resume_step and path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            whole = (line for line in lines if line.endswith(b"\n"))
            kept = b"".join(w for w in whole if msgspec.json.decode(w)["step"] <= resume_step)
        path.write_bytes(kept)
        self._file = path.open("ab", buffering=0)
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise AdaSpecError(
                    "tensorboard = true needs the package; install adaspec[tensorboard]."
                ) from None
            self._board = SummaryWriter(path.parent / "tensorboard", purge_step=resume_step + 1)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Log one event."""
        event = {"kind": kind, "step": step, **values}
        self._file.write(msgspec.json.encode(event) + b"\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
