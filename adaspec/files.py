"""Writes that a reader, or a crash, never sees half done."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Fill a temporary sibling; on success it takes the place of ``directory``.

    The directory appears complete or not at all, its files readable to whom the umask allows. When
    one of that name exists it is renamed away first and deleted after the new one is in place. If
    the body raises, nothing changes.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        yield fresh
        # safetensors writes files that only their owner can read, whatever the umask allows.
        mode = fresh.stat().st_mode & 0o666
        for path in sorted(fresh.rglob("*")):
            if path.is_file():
                path.chmod(mode)
                _flush(path)
        if directory.exists():
            os.replace(directory, staging / "old")
        os.replace(fresh, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_file(path: Path, content: bytes) -> None:
    """Put a file with this content in the place of ``path``, on disk when this returns.

    Until it is there it is called ``.NAME.*``, which only a crash leaves behind.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Force a rename to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush(path: Path) -> None:
    """Force a file's content to disk, so that the rename cannot outlive it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
