"""Where server and learner meet: one owner-only directory of ZeroMQ sockets.

The learner binds all of them, servers and monitors connect, so that any side may come, go and come
back in any order.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.hosts import is_loopback

# sockaddr_un.sun_path holds 108 bytes with the terminator.
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True)
class Channel:
    """ZeroMQ endpoints of one server-learner pair.

    Attributes:
        feedback: records, server to learner (PUSH to PULL).
        versions: announcements of new weights, learner to servers (PUB to SUB).
        status: the learner's state, learner to monitors (PUB to SUB).
        control: an operator's requests, operator to learner (REQ to REP).
    """

    feedback: str
    versions: str
    status: str
    control: str


def open_channel(directory: Path) -> Channel:
    """The channel in a directory, which is made, readable by its owner only, if it does not exist.

    Raises:
        AdaSpecError: if the directory cannot be made, belongs to another user, is open to other
            users, or its path is too long for a socket.
    """
    directory = directory.absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise AdaSpecError(
            f"the channel directory {directory} cannot be made ({error.strerror}); choose a "
            "directory you can write to."
        ) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise AdaSpecError(
            f"the channel directory {directory} is open to other users (owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o}); make it yours with chmod 700, or choose "
            "another."
        )
    names = ("feedback", "versions", "status", "control")
    paths = [directory / f"{name}.sock" for name in names]
    if max(len(os.fsencode(path)) for path in paths) > _MAX_SOCKET_PATH:
        raise AdaSpecError(
            f"the channel directory {directory} has too long a path for a socket; choose one of at "
            f"most {_MAX_SOCKET_PATH - len('/feedback.sock')} bytes."
        )
    return Channel(*(f"ipc://{path}" for path in paths))


def check_endpoint(endpoint: str) -> str:
    """The endpoint, if feedback may travel over it: ``ipc://`` or ``tcp://`` on this machine.

    Raises:
        AdaSpecError: for any other transport, and for TCP to or from another machine, which would
            carry users' tokens unencrypted.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        return endpoint
    if scheme == "tcp":
        if is_loopback(address.rpartition(":")[0].strip("[]")):
            return endpoint
        raise AdaSpecError(
            f"{endpoint} leaves this machine, and the channel is not encrypted; use a loopback "
            "address or an ipc:// path."
        )
    raise AdaSpecError(f"{endpoint!r} is not an ipc:// or tcp:// endpoint; correct it.")
