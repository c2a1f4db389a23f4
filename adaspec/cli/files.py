"""Files that commands write."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

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


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a document for people and machines to read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
