"""Content hashes: of whole drafters, and of the weights that cached context K/V depend on."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from adaspec.errors import AdaSpecError
from adaspec.files import open_regular

MANIFEST_NAME = "manifest.json"

# A context K/V entry is k_norm(k_proj(f)), v_proj(f) with f = hidden_norm(fc(taps)).
_CONTEXT_WEIGHT = re.compile(
    r"fc\.weight|hidden_norm\.weight|layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
)


def is_context_weight(name: str) -> bool:
    """Whether context K/V depend on this parameter (frozen in the mode ``frozen-kv``)."""
    return _CONTEXT_WEIGHT.fullmatch(name) is not None


def context_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, types, shapes and bytes of the weights context K/V are made of."""
    digest = hashlib.sha256()
    for name in sorted(filter(is_context_weight, tensors)):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_digest(path: Path, most: int | None = None, *, follow: bool = True) -> str:
    """Hexadecimal SHA-256 of a file.

    Args:
        most, follow: see `open_regular`.

    Raises:
        OSError: if it cannot be read, or is larger; nothing has been hashed then.
    """
    with open_regular(path, most, follow=follow) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(directory: Path, most: int) -> str:
    """SHA-256 over the weight files of a drafter directory, in name order.

    Args:
        most: bytes that each may have; see `weights_limit`.

    Raises:
        AdaSpecError: if there is none, or one cannot be read or is larger.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise AdaSpecError(
            f"{directory} has no .safetensors file; give the directory of a drafter."
        )
    try:
        if len(paths) == 1:
            return file_digest(paths[0], most)
        digests = [file_digest(path, most) for path in paths]
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    except OSError as error:
        raise AdaSpecError(
            f"the weights in {directory} cannot be read: {error.strerror}; restore them."
        ) from error
