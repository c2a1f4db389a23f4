"""Whose a version is: its learner's by signature, or by who can write to the store.

Signatures are Ed25519 over the bytes of the manifest, which holds the SHA-256 of the weights. Who
has no key can still move the pointer among versions that the learner has signed, which may cost
speed and can change no output.
"""

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from adaspec.errors import AdaSpecError
from adaspec.files import read_bounded

SIGNATURE_NAME = "manifest.sig"
_BYTES = 64


def sign(manifest: bytes, signing: str) -> bytes:
    """The signature of a manifest, 64 bytes.

    Args:
        signing: `LearnerKeys.signing`.
    """
    return _private(signing).sign(manifest)


def signer_of(signing: str) -> str:
    """`ServerKeys.signer` of the keys with this `LearnerKeys.signing`."""
    return _private(signing).public_key().public_bytes_raw().hex()


def check_signature(manifest: bytes, directory: Path, signer: str) -> None:
    """Refuse a version that its learner has not signed.

    Args:
        manifest: its bytes.
        directory: of the version.
        signer: `ServerKeys.signer`.

    Raises:
        AdaSpecError: if there is no signature, or it is another's.
    """
    try:
        signature = read_bounded(directory / SIGNATURE_NAME, _BYTES, follow=False)
    except OSError as error:
        raise AdaSpecError(
            f"{directory} is not signed ({SIGNATURE_NAME}: {error.strerror}), but there are keys; "
            "a learner with keys signs what it writes, so let it make a new store."
        ) from error
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, manifest)
    except InvalidSignature:
        raise AdaSpecError(
            f"{directory} is not signed by the learner that these keys belong to; delete that "
            "version and find out who wrote it, or use the keys the store was made with."
        ) from None


def check_owner(directory: Path) -> None:
    """Refuse a directory of versions that another user can write to.

    Raises:
        AdaSpecError: if another user, other than root, owns it, or its mode lets others write.
    """
    try:
        status = directory.stat()
    except OSError as error:
        raise AdaSpecError(f"{directory} cannot be read ({error.strerror}).") from error
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
        raise AdaSpecError(
            f"others can write to {directory} (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}), and so choose the drafter; make it yours with "
            "chown and chmod go-w, or use keys (`adaspec keys`), which sign versions."
        )


def _private(signing: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(signing))
