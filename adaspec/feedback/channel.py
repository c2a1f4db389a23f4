"""Where server, learner and operator meet: four ZeroMQ sockets.

They lie in one directory that only its owner may enter, or at four neighbouring TCP ports, where
keys are needed. The learner binds all of them, servers and operators connect, so that any side may
come, go and come back in any order.
"""

import errno
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.feedback.keys import LearnerKeys, OperatorKeys, read_keys, write_private
from adaspec.feedback.sockets import Endpoint, check_endpoint
from adaspec.files import read_bounded

# sockaddr_un.sun_path holds 108 bytes with the terminator.
_MAX_SOCKET_PATH = 107
_MOST_TOKEN_BYTES = 1024
_NAMES = ("feedback", "versions", "status", "control")


@dataclass(frozen=True)
class Channel:
    """The endpoints of one learner and its servers.

    Attributes:
        feedback: records, server to learner (PUSH to PULL).
        versions: announcements of new weights, learner to servers (PUB to SUB).
        status: the learner's state, learner to monitors (PUB to SUB).
        control: an operator's requests, operator to learner (REQ to REP).
        token: file of the token that requests must carry; None where it is among the keys.
    """

    feedback: Endpoint
    versions: Endpoint
    status: Endpoint
    control: Endpoint
    token: Path | None

    def make_control_token(self) -> str:
        """The token that a learner asks for from now on.

        Raises:
            AdaSpecError: if it cannot be written, or the keys are not a learner's.
        """
        if self.token is None:
            return read_keys(Path(str(self.control.keys)), LearnerKeys).control_token
        token = secrets.token_urlsafe(32)
        try:
            self.token.unlink(missing_ok=True)
            write_private(self.token, token.encode())
        except OSError as error:
            raise AdaSpecError(
                f"{self.token} cannot be written ({error.strerror}); choose another channel "
                "directory."
            ) from error
        return token

    def signing_key(self) -> str | None:
        """What a learner signs versions with; None without keys.

        Raises:
            AdaSpecError: if the keys are not a learner's.
        """
        keys = self.versions.keys
        return None if keys is None else read_keys(Path(keys), LearnerKeys).signing

    def control_token(self) -> str:
        """The token that the learner asks for; empty if no learner has made one.

        Raises:
            AdaSpecError: if the keys are not an operator's, or the token's file holds none.
        """
        if self.token is None:
            return read_keys(Path(str(self.control.keys)), OperatorKeys).control_token
        try:
            return read_bounded(self.token, _MOST_TOKEN_BYTES).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno != errno.EFBIG:
                return ""
            raise AdaSpecError(
                f"{self.token} is not a control token; start the learner again, which makes one."
            ) from error


def open_channel(directory: Path, keys: Path | None = None) -> Channel:
    """The channel in a directory, which is made, readable by its owner only, if it does not exist.

    Args:
        keys: file of keys, if permissions alone are not trusted.

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
    paths = [directory / f"{name}.sock" for name in _NAMES]
    if max(len(os.fsencode(path)) for path in paths) > _MAX_SOCKET_PATH:
        raise AdaSpecError(
            f"the channel directory {directory} has too long a path for a socket; choose one of at "
            f"most {_MAX_SOCKET_PATH - len('/feedback.sock')} bytes."
        )
    token = directory / "control.token" if keys is None else None
    return _channel([f"ipc://{path}" for path in paths], keys, token)


def network_channel(address: str, keys: Path) -> Channel:
    """The channel at four neighbouring TCP ports.

    Args:
        address: ``tcp://HOST:PORT`` of the first; HOST may be ``0.0.0.0`` for a learner.
        keys: file of keys of the role that uses it.

    Raises:
        AdaSpecError: if the address is of another form.
    """
    host, _, port = address.rpartition(":")
    if not (host.startswith("tcp://") and port.isdecimal() and 0 < int(port) <= 65535 - 3):
        raise AdaSpecError(
            f"{address!r} is not tcp://HOST:PORT with three ports behind it; correct it."
        )
    return _channel([f"{host}:{int(port) + n}" for n in range(len(_NAMES))], keys, None)


def find_channel(directory: str | None, address: str | None, keys: str | None) -> Channel:
    """The channel that is meant by these settings; a leading ``~`` in a path is the home.

    Raises:
        AdaSpecError: if it is not one, or cannot be used.
    """
    if (directory is None) == (address is None):
        raise AdaSpecError(
            "a channel is a directory or an address: name one of both, and with an address keys."
        )
    file = None if keys is None else Path(keys).expanduser()
    if directory is not None:
        return open_channel(Path(directory).expanduser(), file)
    if file is None:
        raise AdaSpecError(
            f"{address} needs keys, since whoever reaches it could read what users say; make some "
            "with `adaspec keys` and name the file."
        )
    return network_channel(str(address), file)


def _channel(addresses: list[str], keys: Path | None, token: Path | None) -> Channel:
    name = None if keys is None else str(keys.absolute())
    feedback, versions, status, control = (
        check_endpoint(Endpoint(address, name)) for address in addresses
    )
    return Channel(feedback, versions, status, control, token)
