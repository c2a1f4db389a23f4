"""Where `adaspec serve --online` keeps its things, for commands that come after it."""

from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.target.smollm2 import cache_directory

_HOME = "online"
_CHANNEL, _STORE = "channel", "store"


def online_home(lineage: str) -> Path:
    """The directory of a drafter's channel and versions."""
    return cache_directory() / _HOME / lineage


def channel_directory(home: Path) -> Path:
    """Sockets that server, learner and operator share."""
    return home / _CHANNEL


def store_directory(home: Path) -> Path:
    """The version store."""
    return home / _STORE


def only_channel(given: Path | None) -> Path:
    """The channel that is meant.

    Raises:
        AdaSpecError: if none is given and there is not exactly one.
    """
    return given or _only(_CHANNEL, "--channel")


def only_store(given: Path | None) -> Path:
    """The version store that is meant.

    Raises:
        AdaSpecError: if none is given and there is not exactly one.
    """
    return given or _only(_STORE, "--store")


def _only(name: str, option: str) -> Path:
    found = sorted((cache_directory() / _HOME).glob(f"*/{name}"))
    if not found:
        raise AdaSpecError(
            f"`adaspec serve --online` has left nothing in {cache_directory() / _HOME}; start it, "
            f"or name a directory with {option}."
        )
    if len(found) > 1:
        raise AdaSpecError(
            f"several drafters were served here; name one of {', '.join(map(str, found))} with "
            f"{option}."
        )
    return found[0]
