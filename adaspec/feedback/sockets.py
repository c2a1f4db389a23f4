"""ZeroMQ sockets, one context each; encrypted, and peers authenticated, if there are keys."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from adaspec.errors import AdaSpecError
from adaspec.feedback.keys import LearnerKeys, read_any_keys, read_keys
from adaspec.hosts import is_loopback

logger = logging.getLogger(__name__)

Options = Mapping[zmq.SocketOption, int | bytes]

_DOMAIN = "adaspec"


@dataclass(frozen=True)
class Endpoint:
    """Where two processes meet.

    Attributes:
        address: ``ipc://PATH`` or ``tcp://HOST:PORT``.
        keys: path of a file of keys (`adaspec.feedback.keys`); None: an open socket, for which
            permissions of the path or a loopback address must do.
    """

    address: str
    keys: str | None = None

    def __str__(self) -> str:
        """The address."""
        return self.address


def check_endpoint(endpoint: Endpoint) -> Endpoint:
    """The endpoint, if users' tokens may travel over it.

    Raises:
        AdaSpecError: for any other transport than ipc and TCP, and for TCP to or from another
            machine without keys.
    """
    scheme, _, address = endpoint.address.partition("://")
    if scheme == "ipc" and address:
        return endpoint
    if scheme == "tcp" and address.rpartition(":")[2].isdecimal():
        if endpoint.keys is not None or is_loopback(address.rpartition(":")[0].strip("[]")):
            return endpoint
        raise AdaSpecError(
            f"{endpoint} leaves this machine without encryption; name keys that `adaspec keys` has "
            "made, or use a loopback address or an ipc:// path."
        )
    raise AdaSpecError(f"{endpoint.address!r} is not an ipc:// or tcp:// endpoint; correct it.")


class Line:
    """A socket in a context of its own.

    Attributes:
        socket: bound or connected.
    """

    def __init__(self, kind: int, options: Options) -> None:
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def close(self) -> None:
        """Release the address; what was not sent is lost."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def bind(self, endpoint: Endpoint) -> None:
        """Take the learner's side: with keys, peers that it does not know are turned away."""
        if endpoint.keys is not None:
            keys = read_keys(Path(endpoint.keys), LearnerKeys)
            # Must listen before the socket does, or strangers would be let in until then.
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                domain=_DOMAIN, credentials_provider=_Known(keys.peers, endpoint.address)
            )
            # Nobody gets in if the authenticator is not there.
            self.socket.zap_domain = _DOMAIN.encode()
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self.socket.curve_server = True
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.bind(endpoint.address)

    def connect(self, endpoint: Endpoint) -> None:
        """Take a server's or an operator's side; the learner may come and go."""
        if endpoint.keys is not None:
            keys = read_any_keys(Path(endpoint.keys))
            if isinstance(keys, LearnerKeys):
                raise AdaSpecError(
                    f"{endpoint.keys} holds the keys of a learner; a server's or an operator's are "
                    "needed here."
                )
            self.socket.curve_serverkey = keys.learner.encode()
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.connect(endpoint.address)


def bind(kind: int, endpoint: Endpoint, options: Options | None = None) -> Line:
    """A socket that others connect to.

    Raises:
        AdaSpecError: if the endpoint or its keys cannot be used, or the address is taken.
    """
    return _open(kind, endpoint, options, connects=False)


def connect(kind: int, endpoint: Endpoint, options: Options | None = None) -> Line:
    """A socket that connects to another, now or once that is there.

    Raises:
        AdaSpecError: if the endpoint or its keys cannot be used.
    """
    return _open(kind, endpoint, options, connects=True)


def _open(kind: int, endpoint: Endpoint, options: Options | None, connects: bool) -> Line:
    check_endpoint(endpoint)
    line = Line(kind, options or {})
    try:
        if connects:
            line.connect(endpoint)
        else:
            line.bind(endpoint)
    except zmq.ZMQError as error:
        line.close()
        raise AdaSpecError(
            f"{endpoint} cannot be used ({error}); stop what uses it, or choose another address."
        ) from error
    except BaseException:
        line.close()
        raise
    return line


class _Known:
    """Says which public keys may connect; a stranger is named once."""

    def __init__(self, peers: tuple[str, ...], address: str) -> None:
        self._peers = {peer.encode() for peer in peers}
        self._address = address
        self._strangers: set[bytes] = set()

    def callback(self, domain: str, key: Any) -> bool:
        """As `ThreadAuthenticator` asks; ``key`` is Z85."""
        if key in self._peers:
            return True
        if key not in self._strangers and len(self._strangers) < 64:
            self._strangers.add(key)
            logger.warning("a stranger was turned away at %s", self._address)
        return False
