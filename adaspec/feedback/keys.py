"""Who may speak to whom: one file of keys for each role.

The learner, the servers and the operators each hold one file, which lets them do what their role
does and nothing else. Sockets between them are CURVE sockets (Curve25519, as in CurveZMQ), the
manifests of versions are signed (Ed25519), and an operator's requests carry a token.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from adaspec.errors import AdaSpecError

Role = Literal["learner", "server", "operator"]
_Z85Key = Annotated[str, Meta(min_length=40, max_length=40)]
_HexKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Token = Annotated[str, Meta(min_length=32, max_length=128)]

_LARGEST_FILE = 1 << 16


class _Keys(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="role"
):
    """What every role holds.

    Attributes:
        public, secret: of its own sockets, Z85.
    """

    public: _Z85Key
    secret: _Z85Key


class LearnerKeys(_Keys, frozen=True, kw_only=True, tag="learner"):
    """Of the learner.

    Attributes:
        peers: public keys that may connect.
        signing: private key of the signatures of versions, hexadecimal.
        control_token: that requests must carry.
    """

    peers: tuple[_Z85Key, ...]
    signing: _HexKey
    control_token: _Token


class ServerKeys(_Keys, frozen=True, kw_only=True, tag="server"):
    """Of the servers that follow a learner.

    Attributes:
        learner: its public key.
        signer: public key of the signatures of versions, hexadecimal.
    """

    learner: _Z85Key
    signer: _HexKey


class OperatorKeys(_Keys, frozen=True, kw_only=True, tag="operator"):
    """Of those who may steer a learner.

    Attributes:
        learner: its public key.
        control_token: see `LearnerKeys`.
    """

    learner: _Z85Key
    control_token: _Token


Keys = LearnerKeys | ServerKeys | OperatorKeys
_Some = TypeVar("_Some", LearnerKeys, ServerKeys, OperatorKeys)


def make_keys(directory: Path) -> dict[Role, Path]:
    """Write a new file of keys for each role.

    Raises:
        AdaSpecError: if there are keys already, or the directory cannot be written.
    """
    (learner, server, operator) = (_pair() for _ in range(3))
    signing = Ed25519PrivateKey.generate()
    token = secrets.token_urlsafe(32)
    files: dict[Role, Keys] = {
        "learner": LearnerKeys(
            **learner,
            peers=(server["public"], operator["public"]),
            signing=signing.private_bytes_raw().hex(),
            control_token=token,
        ),
        "server": ServerKeys(
            **server,
            learner=learner["public"],
            signer=signing.public_key().public_bytes_raw().hex(),
        ),
        "operator": OperatorKeys(**operator, learner=learner["public"], control_token=token),
    }
    paths: dict[Role, Path] = {role: directory / f"{role}.keys" for role in files}
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role, path in paths.items():
            write_private(path, msgspec.json.format(msgspec.json.encode(files[role]), indent=2))
    except FileExistsError as error:
        raise AdaSpecError(
            f"{error.filename} exists; delete it if nobody uses it, or choose another directory."
        ) from error
    except OSError as error:
        raise AdaSpecError(
            f"keys cannot be written to {directory} ({error.strerror}); choose a directory you can "
            "write to."
        ) from error
    return paths


def read_keys(path: Path, kind: type[_Some]) -> _Some:
    """The keys in a file.

    Raises:
        AdaSpecError: if it cannot be read, is open to other users, or is of another role.
    """
    keys = read_any_keys(path)
    if not isinstance(keys, kind):
        wanted, found = (k.__struct_config__.tag for k in (kind, type(keys)))
        raise AdaSpecError(f"{path} holds the keys of a {found}; the {wanted}'s are needed here.")
    return keys


def read_any_keys(path: Path) -> Keys:
    """The keys in a file, of whatever role; see `read_keys`."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise AdaSpecError(
            f"the keys {path} cannot be read ({error.strerror}); make some with `adaspec keys`."
        ) from error
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise AdaSpecError(
            f"the keys {path} are open to other users (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}); make them yours with chmod 600."
        )
    try:
        return msgspec.json.decode(content, type=Keys)
    except msgspec.DecodeError as error:
        raise AdaSpecError(
            f"{path} holds no keys ({error}); name a file that `adaspec keys` has written."
        ) from error


def write_private(path: Path, content: bytes) -> None:
    """Make a file that only its owner can read.

    Raises:
        OSError: if it exists, or cannot be written.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _pair() -> dict[str, str]:
    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode()}
