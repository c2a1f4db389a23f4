"""Typed TOML files of the running system: read in one way, refused in one sentence."""

from pathlib import Path
from typing import TypeVar

import msgspec

from adaspec.errors import AdaSpecError

Settings = TypeVar("Settings", bound=msgspec.Struct)


def read_settings(path: Path, kind: type[Settings], name: str, hint: str) -> Settings:
    """Read and check a settings file.

    Args:
        kind: what the file must hold; structs that forbid unknown fields refuse typing errors.
        name: of the file in errors, as in "the AdaSpec configuration".
        hint: what to do if it cannot be read.

    Raises:
        AdaSpecError: if it is missing, is not TOML in UTF-8, or holds an unknown key or bad value.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise AdaSpecError(f"cannot read {name} {path}: {error.strerror}; {hint}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise AdaSpecError(f"{name} {path} is not valid: {error}.") from error
