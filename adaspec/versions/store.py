"""The version store: immutable, numbered drafter directories and one pointer to the live one.

    CURRENT                      the pointer, JSON, replaced atomically
    versions/00000000/           the base; each version is a complete drafter directory
        config.json  model.safetensors  manifest.json  manifest.sig (if the learner has keys)

Readers need no lock: a version is complete or absent, and is checked when it is staged. Nothing in
a store may be a symbolic link, and no file is read that is larger than it may be. Versions are the
learner's: signed, where there are keys, else in directories that nobody else can write to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from adaspec.drafters.checkpoint import (
    WEIGHTS_NAME,
    check_tensors,
    parameter_shapes,
    read_drafter_config,
    read_tensors,
    weights_limit,
)
from adaspec.drafters.config import DrafterConfig
from adaspec.errors import AdaSpecError
from adaspec.files import read_bounded
from adaspec.versions.digest import MANIFEST_NAME, context_digest, file_digest, weights_digest
from adaspec.versions.manifest import Manifest, Pointer, TensorInfo
from adaspec.versions.trust import check_owner, check_signature

POINTER_NAME = "CURRENT"
BASE = 0

_MOST_MANIFEST_BYTES = 4 << 20
_MOST_POINTER_BYTES = 1 << 16


@dataclass(frozen=True)
class StagedVersion:
    """A version whose weights were read and passed every check.

    Attributes:
        tensors: on the CPU, in the types of the base.
    """

    manifest: Manifest
    tensors: dict[str, Tensor]


class VersionStore:
    """Reads a store.

    Args:
        signer: `ServerKeys.signer` of the learner whose versions these must be; None: nobody else
            may be able to write to the store.

    Raises:
        AdaSpecError: if the directory holds no store, its base cannot be read, or it is not the
            learner's.
    """

    def __init__(self, directory: Path, signer: str | None = None) -> None:
        self.directory = directory.absolute()
        self._signer = signer
        base = self.path(BASE)
        if not (base / MANIFEST_NAME).is_file():
            raise AdaSpecError(
                f"{directory} holds no drafter versions; start the learner, which makes them, or "
                "check the path."
            )
        if signer is None:
            check_owner(self.directory)
            check_owner(versions_directory(self.directory))
        self._check_inside(BASE)
        self.config: DrafterConfig = read_drafter_config(base, follow=False)
        self._shapes = parameter_shapes(self.config)
        self.base = self._read_manifest(BASE)

    @property
    def lineage(self) -> str:
        """Of the base and so of every version."""
        return self.base.lineage

    def path(self, number: int) -> Path:
        """Directory of a version, whether or not it exists."""
        return versions_directory(self.directory) / f"{number:08d}"

    def numbers(self) -> list[int]:
        """Complete versions, ascending."""
        return version_numbers(self.directory)

    def current(self) -> Pointer:
        """The live version.

        Raises:
            AdaSpecError: if there is no pointer, it is damaged, or it belongs to another lineage.
        """
        pointer = read_pointer(self.directory)
        if pointer is None:
            raise AdaSpecError(
                f"{self.directory} has no {POINTER_NAME} file; start the learner to restore it."
            )
        if pointer.lineage != self.lineage:
            raise AdaSpecError(
                f"{self.directory / POINTER_NAME} belongs to lineage {pointer.lineage}, the "
                f"versions to {self.lineage}; do not mix stores."
            )
        return pointer

    def manifest(self, number: int) -> Manifest:
        """The manifest of a version.

        Raises:
            AdaSpecError: if it is missing, damaged, not the learner's, or of another version,
                lineage or network.
        """
        manifest = self._read_manifest(number)
        if manifest.lineage != self.lineage:
            raise AdaSpecError(
                f"version {number} in {self.directory} belongs to lineage {manifest.lineage} "
                f"instead of {self.lineage}; do not mix stores."
            )
        if manifest.tensors != self.base.tensors:
            raise AdaSpecError(
                f"version {number} in {self.directory} has other tensors than the base; "
                "delete that version."
            )
        return manifest

    def stage(self, number: int) -> StagedVersion:
        """Read a version and check all of it: size, file hash, names, shapes, types, finiteness.

        Takes as long as reading and hashing the file; call it off the serving thread. A file that
        is larger than the weights can be is neither read nor hashed.

        Raises:
            AdaSpecError: naming what is wrong.
        """
        manifest = self.manifest(number)
        directory = self.path(number)
        most = weights_limit(self._shapes)
        try:
            found = file_digest(directory / WEIGHTS_NAME, most, follow=False)
        except OSError as error:
            raise AdaSpecError(
                f"the weights of version {number} cannot be read ({error.strerror}); delete that "
                "version."
            ) from error
        if found != manifest.sha256:
            raise AdaSpecError(
                f"the weights of version {number} have SHA-256 {found} instead of "
                f"{manifest.sha256}; the file is damaged, delete that version."
            )
        tensors = read_tensors(directory, most, follow=False)
        check_tensors(tensors, self._shapes, str(directory))
        if describe_tensors(tensors) != manifest.tensors:
            raise AdaSpecError(
                f"the weights of version {number} have other types than its manifest says; delete "
                "that version."
            )
        if context_digest(tensors) != manifest.context_sha256:
            raise AdaSpecError(
                f"the context weights of version {number} do not have the hash in its manifest; "
                "delete that version."
            )
        return StagedVersion(manifest, tensors)

    def _read_manifest(self, number: int) -> Manifest:
        path = self.path(number) / MANIFEST_NAME
        self._check_inside(number)
        try:
            content = read_bounded(path, _MOST_MANIFEST_BYTES, follow=False)
            self._check_trusted(content, path.parent)
            manifest = msgspec.json.decode(content, type=Manifest)
        except FileNotFoundError as error:
            raise AdaSpecError(
                f"version {number} is not in {self.directory} ({error.strerror}); it was pruned or "
                "never published."
            ) from error
        except OSError as error:
            raise AdaSpecError(
                f"{path} cannot be read ({error.strerror}); delete that version."
            ) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise AdaSpecError(f"{path} is damaged ({error}); delete that version.") from error
        if manifest.number != number:
            raise AdaSpecError(
                f"{path} describes version {manifest.number}; a version must not be renamed."
            )
        return manifest

    def _check_trusted(self, manifest: bytes, directory: Path) -> None:
        if self._signer is None:
            check_owner(directory)
        else:
            check_signature(manifest, directory, self._signer)

    def _check_inside(self, number: int) -> None:
        for directory in (versions_directory(self.directory), self.path(number)):
            if directory.is_symlink():
                raise AdaSpecError(
                    f"{directory} is a symbolic link; versions must lie in the store."
                )


def read_pointer(directory: Path) -> Pointer | None:
    """The pointer of the store in ``directory``; None if there is none yet.

    Raises:
        AdaSpecError: if it is damaged.
    """
    path = directory / POINTER_NAME
    try:
        content = read_bounded(path, _MOST_POINTER_BYTES, follow=False)
        return msgspec.json.decode(content, type=Pointer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise AdaSpecError(
            f"{path} is damaged ({error}); restart the learner to restore it."
        ) from error


def lineage_of(drafter: Path) -> str:
    """The lineage a drafter directory belongs to: its base's, or its own as the base of a new one.

    Raises:
        AdaSpecError: if the directory has no readable configuration or weights.
    """
    manifest = read_manifest(drafter)
    if manifest is not None:
        return manifest.lineage
    most = weights_limit(parameter_shapes(read_drafter_config(drafter)))
    return weights_digest(drafter, most)[:16]


def read_manifest(drafter: Path) -> Manifest | None:
    """The manifest beside a drafter's weights; None if the directory is no version of a store."""
    try:
        content = read_bounded(drafter / MANIFEST_NAME, _MOST_MANIFEST_BYTES)
        return msgspec.json.decode(content, type=Manifest)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Types and shapes for a manifest."""
    return {
        name: msgspec.convert(
            {"dtype": str(t.dtype).removeprefix("torch."), "shape": tuple(t.shape)}, TensorInfo
        )
        for name, t in sorted(tensors.items())
    }


def versions_directory(store: Path) -> Path:
    """Where the versions lie."""
    return store / "versions"


def version_numbers(store: Path) -> list[int]:
    """Complete versions in a store directory, ascending; names of any other form are ignored."""
    directory = versions_directory(store)
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir())
    return sorted(int(name) for name in names if len(name) == 8 and name.isdecimal())
