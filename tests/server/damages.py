"""Ways in which a published version can be damaged on disk, and the reason it is refused with."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from adaspec.versions import Manifest
from adaspec.versions.digest import context_digest, file_digest


def cut_short(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def flip_a_bit(directory: Path) -> None:
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 4
    weights.write_bytes(content)


def rewrite(directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a weight and make the manifest agree."""
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors["norm.weight"] = change(tensors["norm.weight"]).contiguous()
    save_file(tensors, weights)
    amend(
        directory,
        sha256=file_digest(weights),
        context_sha256=context_digest(tensors),
    )


def amend(directory: Path, **changes: object) -> None:
    path = directory / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut_short, "SHA-256"),
    "a flipped bit": (flip_a_bit, "SHA-256"),
    "NaN": (lambda d: rewrite(d, lambda t: t * torch.nan), "NaN or infinite"),
    "another shape": (lambda d: rewrite(d, lambda t: t[1:]), "has shape"),
    "another type": (lambda d: rewrite(d, lambda t: t.half()), "other types"),
    "foreign": (lambda d: amend(d, lineage="f" * 16), "belongs to lineage"),
    "other context": (lambda d: amend(d, context_sha256="0" * 64), "context weights"),
    "a torn manifest": (lambda d: (d / "manifest.json").write_text('{"format":'), "is damaged"),
    "missing": (lambda d: d.rename(d.with_name(".gone")), "is not in"),
}
