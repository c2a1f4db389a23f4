"""Files that commands write."""

from pathlib import Path

from adaspec.errors import AdaSpecError


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written before there is anything to write.

    Raises:
        AdaSpecError: naming the option that chose it.
    """
    try:
        path.open("ab").close()
    except OSError as error:
        raise AdaSpecError(
            f"cannot write {path}: {error.strerror}; choose another file with {option}."
        ) from error
