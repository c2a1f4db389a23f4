"""A drafter version as a plain drafter directory, which stock SGLang's DFLASH loads as it is."""

import shutil
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.files import open_regular, replace_directory
from adaspec.versions.digest import MANIFEST_NAME
from adaspec.versions.store import VersionStore
from adaspec.versions.trust import SIGNATURE_NAME


def export_version(store: Path, directory: Path, number: int | None = None) -> int:
    """Copy a version out of its store; its number.

    The copy holds what the base was made of, configuration and weights, and no manifest, so it can
    be served, trained from, and be the base of a new store. A learner may run meanwhile.

    Args:
        store: directory of the version store.
        directory: made; must not exist.
        number: None for the live version.

    Raises:
        AdaSpecError: if there is no such version, it is damaged, or the directory exists or cannot
            be written.
    """
    versions = VersionStore(store)
    if number is None:
        number = versions.current().number
    versions.stage(number)
    source = versions.path(number)
    if directory.exists():
        raise AdaSpecError(f"{directory} exists; name a directory that does not.")
    try:
        with replace_directory(directory) as fresh:
            for path in source.iterdir():
                if path.name not in (MANIFEST_NAME, SIGNATURE_NAME):
                    with (
                        open_regular(path, follow=False) as file,
                        (fresh / path.name).open("wb") as copy,
                    ):
                        shutil.copyfileobj(file, copy)
    except OSError as error:
        raise AdaSpecError(
            f"{source} cannot be copied to {directory} ({error.strerror}); name another directory "
            "or free some disk space."
        ) from error
    return number
