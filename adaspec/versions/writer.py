"""The learner's side of the version store.

Publication is two atomic steps: a complete version directory appears, then the pointer moves to
it. A crash before the first leaves nothing but a hidden scratch directory, which the next writer
deletes; a crash between them leaves a version that is not live. Numbers are never used twice.
"""

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adaspec.drafters.checkpoint import (
    WEIGHTS_NAME,
    check_tensors,
    parameter_shapes,
    read_config_bytes,
    read_drafter_config,
    read_tensors,
    weights_limit,
)
from adaspec.errors import AdaSpecError
from adaspec.files import flush_directory, replace_directory, replace_file
from adaspec.versions.digest import MANIFEST_NAME, context_digest, file_digest
from adaspec.versions.manifest import Manifest, Pointer, Provenance
from adaspec.versions.store import (
    BASE,
    POINTER_NAME,
    VersionStore,
    describe_tensors,
    lineage_of,
    read_pointer,
    version_numbers,
    versions_directory,
)
from adaspec.versions.trust import SIGNATURE_NAME, sign, signer_of

_CONFIG_NAME = "config.json"


class VersionWriter(VersionStore):
    """The one writer of a store; use `open_writer`."""

    def __init__(self, directory: Path, lock: FileLock, signing: str | None) -> None:
        super().__init__(directory, None if signing is None else signer_of(signing))
        self._lock = lock
        self._signing = signing

    def add(self, tensors: Mapping[str, Tensor], provenance: Provenance) -> Manifest:
        """Write a new version; it is not live before `point` names it.

        Args:
            tensors: every weight, in the base's types.

        Raises:
            AdaSpecError: if a tensor does not fit the base or is not finite, if context weights
                of a ``frozen-kv`` version are not the base's, or if the disk is full; nothing is
                visible then.
        """
        number = max([*self.numbers(), self.current().number]) + 1
        check_tensors(tensors, self._shapes, f"version {number}")
        if describe_tensors(tensors) != self.base.tensors:
            raise AdaSpecError(
                f"version {number} has other tensor types than the base; convert it before."
            )
        context = context_digest(tensors)
        if provenance.mode == "frozen-kv" and context != self.base.context_sha256:
            raise AdaSpecError(
                f"version {number} is marked frozen-kv but changes context weights; mark it full."
            )
        return _write_version(
            self.directory,
            number,
            self.lineage,
            tensors,
            read_config_bytes(self.path(BASE), "drafter", follow=False),
            context,
            provenance,
            self._signing,
        )

    def point(self, number: int, reason: str) -> Pointer:
        """Make a version live; naming an older one is a roll-back.

        Raises:
            AdaSpecError: if the version is missing or damaged, or the pointer cannot be written;
                the pointer is unchanged then.
        """
        manifest = self.stage(number).manifest
        return _move_pointer(self.directory, manifest, self.current().sequence + 1, reason)

    def prune(self, keep: int) -> list[int]:
        """Delete all but the base, the live version and the ``keep`` newest; what was deleted."""
        numbers = self.numbers()
        kept = {BASE, self.current().number, *numbers[max(0, len(numbers) - keep) :]}
        deleted = [number for number in numbers if number not in kept]
        for number in deleted:
            # Out of sight in one step, so that no reader meets half a version.
            doomed = self.path(number).with_name(f".{number:08d}.pruned")
            os.replace(self.path(number), doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return deleted

    def close(self) -> None:
        """Let another learner write."""
        self._lock.release()


def open_writer(directory: Path, base: Path, signing: str | None = None) -> VersionWriter:
    """Open a store for writing, made with ``base`` as version 0 if there is none.

    A directory that is made lets nobody else in; one that exists keeps its permissions.

    Args:
        base: drafter directory to learn from.
        signing: `LearnerKeys.signing` to sign versions with; None: they are not signed, and nobody
            else may be able to write to the store.

    Raises:
        AdaSpecError: if another learner writes here, the store belongs to another base or another
            signer, or the directory cannot be written.
    """
    directory = directory.absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        versions = versions_directory(directory)
        if not versions.exists():
            versions.mkdir()
            versions.chmod(versions.stat().st_mode & ~0o022)
        # Opened by the thread that sets the learner up, closed by the one that learns.
        lock = FileLock(directory / ".writer.lock", timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:  # an OSError too
        raise AdaSpecError(
            f"another learner writes to {directory}; stop it, or choose another directory."
        ) from None
    except OSError as error:
        raise AdaSpecError(
            f"the version store {directory} cannot be written ({error.strerror}); choose a "
            "directory you can write to."
        ) from error
    try:
        _remove_leftovers(directory)
        if not version_numbers(directory):
            _write_base(directory, base, signing)
        writer = VersionWriter(directory, lock, signing)
        if lineage_of(base) != writer.lineage:
            raise AdaSpecError(
                f"{directory} holds versions of another drafter than {base}; choose another store "
                "or the drafter it was made from."
            )
        if read_pointer(directory) is None:
            _move_pointer(directory, writer.base, 0, "the drafter the server started with")
        writer.current()
    except BaseException:
        lock.release()
        raise
    return writer


def _write_base(directory: Path, base: Path, signing: str | None) -> None:
    shapes = parameter_shapes(read_drafter_config(base))
    if (base / MANIFEST_NAME).exists():
        raise AdaSpecError(
            f"{base} is a version of another store; go on with that store, or copy the drafter "
            f"without its {MANIFEST_NAME} to start a new lineage."
        )
    tensors = read_tensors(base, weights_limit(shapes))
    check_tensors(tensors, shapes, str(base))
    _write_version(
        directory,
        BASE,
        lineage_of(base),
        tensors,
        read_config_bytes(base, "drafter"),
        context_digest(tensors),
        Provenance(
            parent=None,
            mode="frozen-kv",
            objective="",
            optimiser="",
            steps=0,
            tokens_seen=0,
            gate=None,
        ),
        signing,
    )


def _write_version(
    store: Path,
    number: int,
    lineage: str,
    tensors: Mapping[str, Tensor],
    config: bytes,
    context_sha256: str,
    provenance: Provenance,
    signing: str | None,
) -> Manifest:
    target = versions_directory(store) / f"{number:08d}"
    try:
        with replace_directory(target) as staging:
            weights = staging / WEIGHTS_NAME
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
                weights,
                metadata={"format": "pt"},
            )
            manifest = Manifest(
                lineage=lineage,
                number=number,
                sha256=file_digest(weights),
                context_sha256=context_sha256,
                tensors=describe_tensors(tensors),
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                provenance=provenance,
            )
            (staging / _CONFIG_NAME).write_bytes(config)
            encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            (staging / MANIFEST_NAME).write_bytes(encoded)
            if signing is not None:
                (staging / SIGNATURE_NAME).write_bytes(sign(encoded, signing))
        flush_directory(target.parent)
    except (OSError, SafetensorError) as error:
        raise AdaSpecError(
            f"version {number} could not be written to {store} ({error}); free some disk space. "
            "The live version is unchanged."
        ) from error
    return manifest


def _move_pointer(store: Path, manifest: Manifest, sequence: int, reason: str) -> Pointer:
    pointer = Pointer(
        lineage=manifest.lineage,
        sequence=sequence,
        number=manifest.number,
        sha256=manifest.sha256,
        reason=reason,
    )
    try:
        replace_file(store / POINTER_NAME, msgspec.json.encode(pointer))
    except OSError as error:
        raise AdaSpecError(
            f"version {manifest.number} could not be made live in {store} ({error}); free some "
            "disk space. The live version is unchanged."
        ) from error
    return pointer


def _remove_leftovers(store: Path) -> None:
    """Scratch of a writer that was killed."""
    for path in versions_directory(store).glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in store.glob(f".{POINTER_NAME}.*"):
        path.unlink(missing_ok=True)
