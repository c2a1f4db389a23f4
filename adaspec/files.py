"""Writes that a reader, or a crash, never sees half done, and reads of what others may have put."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Fill a temporary sibling; on success it takes the place of ``directory``.

    The directory appears complete or not at all, readable to whom the umask allows and writable to
    its owner only. When one of that name exists it is renamed away first and deleted after the new
    one is in place. If the body raises, nothing changes.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        yield fresh
        # safetensors writes files that only their owner can read, whatever the umask allows.
        fresh.chmod(fresh.stat().st_mode & 0o755)
        mode = fresh.stat().st_mode & 0o644
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


def open_regular(path: Path, most: int | None = None, *, follow: bool = True) -> BufferedReader:
    """Open a file that somebody else may have put there, for reading.

    Never waits, as opening a pipe does that nobody writes to, and reads nothing.

    Args:
        most: bytes that the file may have; None: any number.
        follow: whether ``path`` itself may be a symbolic link.

    Raises:
        OSError: if it is missing, no regular file, too large, or a link that is not followed;
            ``strerror`` says which.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except ValueError as error:  # a NUL or half a surrogate pair in the name
        raise OSError(errno.EINVAL, f"it is no name of a file: {error}") from None
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink() and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, _too_large(f"{found.st_size}", most))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bounded(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Content of a file that `open_regular` opens.

    Raises:
        OSError: as `open_regular`, also if the file has grown since.
    """
    with open_regular(path, most, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, _too_large("more", most))
    return content


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


def _too_large(size: str, most: int) -> str:
    return f"it has {size} bytes, and only files of up to {most} are read"
