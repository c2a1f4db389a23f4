"""Typed TOML files of the running system: read in one way, refused in one sentence."""

import math
from pathlib import Path
from typing import TypeVar

import msgspec

from adaspec.errors import AdaSpecError
from adaspec.files import read_bounded

Settings = TypeVar("Settings", bound=msgspec.Struct)

_MOST_BYTES = 1 << 20


def read_settings(path: Path, kind: type[Settings], name: str, hint: str) -> Settings:
    """Read and check a settings file.

    Args:
        kind: what the file must hold; structs that forbid unknown fields refuse typing errors.
        name: of the file in errors, as in "the AdaSpec configuration".
        hint: what to do if it cannot be read.

    Raises:
        AdaSpecError: if it is missing, no regular file or larger than 1 MiB, is not TOML in UTF-8,
            or holds an unknown key or bad value; NaN is one, though TOML has it.
    """
    try:
        settings = msgspec.toml.decode(read_bounded(path, _MOST_BYTES), type=kind)
    except OSError as error:
        raise AdaSpecError(f"cannot read {name} {path}: {error.strerror}; {hint}.") from error
    except (msgspec.DecodeError, ValueError) as error:  # of a number of thousands of digits
        raise AdaSpecError(f"{name} {path} is not valid: {error}.") from error
    except RecursionError:
        raise AdaSpecError(f"{name} {path} is not valid: it is nested too deeply.") from None
    if key := _not_a_number(msgspec.to_builtins(settings)):
        raise AdaSpecError(f"{name} {path} is not valid: `{key}` is NaN; give a number.")
    return settings


def _not_a_number(value: object, key: str = "") -> str | None:
    """The first key that is NaN, which no bound of a setting keeps out; None if there is none."""
    if isinstance(value, dict):
        parts = [(f"{key}.{name}" if key else name, inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{key}[{place}]", inner) for place, inner in enumerate(value)]
    else:
        return key if isinstance(value, float) and math.isnan(value) else None
    return next((found for name, inner in parts if (found := _not_a_number(inner, name))), None)
