"""Drafter directories: config.json and safetensors, read strictly and written atomically.

Stock loaders ignore tensors they do not know and leave out of account what is missing; the drafter
then runs and its acceptance quietly collapses. Here every difference is named and refused.

No file is read, mapped or hashed before its size is known to be one that it may have. safetensors
compresses nothing, so a small file cannot grow when it is read; what is left is a file that is too
large itself, or looks so because it is sparse.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaspec.drafters.config import DrafterConfig, parse_config, render_config
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.files import open_regular, read_bounded, replace_directory

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_CONFIG_BYTES = 4 << 20
_MOST_INDEX_BYTES = 16 << 20
_HEADER_BYTES = 1 << 16  # of a safetensors file, without its tensors' entries
_ENTRY_BYTES = 512


def read_drafter_config(directory: Path, *, follow: bool = True) -> DrafterConfig:
    """The configuration of a drafter directory.

    Args:
        follow: whether config.json may be a symbolic link.

    Raises:
        AdaSpecError: if the directory or its config.json is missing, unreadable or not supported.
    """
    return parse_config(read_model_config(directory, "drafter", follow=follow))


def read_model_config(directory: Path, role: str, *, follow: bool = True) -> dict[str, Any]:
    """The decoded config.json of a model directory; ``role`` names it in errors.

    Raises:
        AdaSpecError: if there is none, or it is unreadable, larger than 4 MiB or no JSON object.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(read_config_bytes(directory, role, follow=follow))
    except (ValueError, RecursionError) as error:  # of UTF-8, JSON, an endless number, nesting
        raise AdaSpecError(f"{path} is not valid JSON ({error}); restore the file.") from None
    if not isinstance(raw, dict):
        raise AdaSpecError(f"{path} does not hold a JSON object; restore the file.")
    return raw


def read_config_bytes(directory: Path, role: str, *, follow: bool = True) -> bytes:
    """The config.json of a model directory as it is; see `read_model_config`."""
    if not directory.is_dir():
        raise AdaSpecError(f"the {role} directory {directory} does not exist; check the path.")
    path = directory / "config.json"
    try:
        return read_bounded(path, _MOST_CONFIG_BYTES, follow=follow)
    except FileNotFoundError:
        raise AdaSpecError(
            f"{directory} has no config.json; give the directory of a {role} model."
        ) from None
    except OSError as error:
        raise AdaSpecError(f"{path} cannot be read ({error.strerror}); restore the file.") from None


def check_pair(drafter: DrafterConfig, target: Mapping[str, Any]) -> None:
    """Refuse a drafter that was not made for this target.

    Args:
        target: the target's decoded config.json (its text part, if it has several).

    Raises:
        AdaSpecError: naming the first quantity that differs.
    """
    target = target.get("text_config", target)
    if not isinstance(target, Mapping):
        raise AdaSpecError(
            "the target's config.json has a text_config that is no object; check that it is a "
            "language model."
        )
    expected = {"hidden_size": drafter.hidden_size, "vocab_size": drafter.vocab_size}
    if drafter.num_target_layers is not None:
        expected["num_hidden_layers"] = drafter.num_target_layers
    for key, value in expected.items():
        if target.get(key) != value:
            raise AdaSpecError(
                f"the drafter was made for a target with {key} {value}, but this target has "
                f"{target.get(key)}; use the drafter trained for this target."
            )
    layers = target.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise AdaSpecError(
            f"the target's config.json has num_hidden_layers = {layers!r}, but needs an integer; "
            "check that it is a language model."
        )
    if max(drafter.target_layer_ids) > layers - 2:
        raise AdaSpecError(
            f"the drafter taps target layer {max(drafter.target_layer_ids)}, but a target of "
            f"{layers} layers can be tapped up to layer {layers - 2}; use the drafter trained for "
            "this target."
        )


def check_drafter_for_target(drafter: Path, target: Path) -> DrafterConfig:
    """Check that a drafter directory is complete and belongs to the target in ``target``.

    Every weight is read, so that what is served is what was checked.

    Raises:
        AdaSpecError: naming the first thing that is wrong with either directory or with the pair.
    """
    config = read_drafter_config(drafter)
    check_pair(config, read_model_config(target, "target"))
    load_drafter(drafter)
    return config


def load_drafter(
    directory: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> BlockDrafter:
    """Load a drafter directory, refusing any difference from its own configuration.

    Args:
        dtype: type to convert the weights to; ``None`` keeps that of the checkpoint.

    Raises:
        AdaSpecError: naming every unknown, missing or mis-shaped tensor, or the first one that is
            unreadable or not finite.
    """
    config = read_drafter_config(directory)
    with torch.device("meta"):
        drafter = BlockDrafter(config)
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    tensors = read_tensors(directory, weights_limit(shapes))
    check_tensors(tensors, shapes, str(directory))
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size], source: str
) -> None:
    """Refuse a set of tensors that is not exactly the expected one, or is not finite.

    Raises:
        AdaSpecError: one sentence that names everything that is wrong; ``source`` says where.
    """
    problems = []
    if unknown := sorted(set(tensors) - set(expected)):
        problems.append(f"unknown tensors {', '.join(unknown)}")
    if missing := sorted(set(expected) - set(tensors)):
        problems.append(f"missing tensors {', '.join(missing)}")
    for name in sorted(set(expected) & set(tensors)):
        tensor = tensors[name]
        if tensor.shape != expected[name]:
            problems.append(
                f"{name} has shape {list(tensor.shape)} instead of {list(expected[name])}"
            )
        elif tensor.dtype not in _CHECKPOINT_DTYPES:
            problems.append(f"{name} has type {tensor.dtype}, which is not a plain float type")
        elif not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds NaN or infinite values")
    if problems:
        raise AdaSpecError(
            f"the weights in {source} do not fit their configuration: {'; '.join(problems)}; "
            "use a complete checkpoint of a plain DFlash or AdaFlash drafter."
        )


def parameter_shapes(config: DrafterConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight of a drafter."""
    with torch.device("meta"):
        drafter = BlockDrafter(config)
    return {name: parameter.shape for name, parameter in drafter.named_parameters()}


def weights_limit(shapes: Mapping[str, torch.Size]) -> int:
    """The most bytes that a drafter's weights take in files: in float32, with their headers."""
    widest = max(dtype.itemsize for dtype in _CHECKPOINT_DTYPES)
    return _HEADER_BYTES + sum(
        shape.numel() * widest + len(name.encode()) + _ENTRY_BYTES for name, shape in shapes.items()
    )


def read_tensors(
    directory: Path, most: int | None = None, *, follow: bool = True
) -> dict[str, Tensor]:
    """All tensors of a directory: one model.safetensors, or the shards its index names.

    Args:
        most: bytes that the files may have together; None: the `weights_limit` of the directory's
            own configuration.
        follow: whether a file may be a symbolic link.

    Raises:
        AdaSpecError: if a file is missing, too large, truncated or not safetensors, or a tensor
            appears twice.
    """
    if most is None:
        most = weights_limit(parameter_shapes(read_drafter_config(directory, follow=follow)))
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory, follow):
        try:
            with open_regular(path, most, follow=follow) as regular:
                most -= os.fstat(regular.fileno()).st_size
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    if name in tensors:
                        raise AdaSpecError(
                            f"{path} repeats the tensor {name}; restore the checkpoint."
                        )
                    tensors[name] = file.get_tensor(name)
        except FileNotFoundError:
            raise AdaSpecError(
                f"{path} is missing; restore the file or download the checkpoint again."
            ) from None
        except OSError as error:
            raise AdaSpecError(
                f"{path} cannot be read ({error.strerror or error}); restore the file."
            ) from None
        except (SafetensorError, ValueError, OverflowError) as error:
            raise AdaSpecError(
                f"{path} is truncated or not a safetensors file ({error}); restore the file."
            ) from None
    return tensors


def _weight_files(directory: Path, follow: bool) -> Iterator[Path]:
    index = directory / INDEX_NAME
    if not index.exists():
        yield directory / WEIGHTS_NAME
        return
    try:
        content = read_bounded(index, _MOST_INDEX_BYTES, follow=follow)
        shards = set(json.loads(content)["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise AdaSpecError(
            f"{index} is not a safetensors index; restore the file or delete it if there is a "
            f"{WEIGHTS_NAME}."
        ) from None
    for shard in sorted(shards, key=str):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise AdaSpecError(f"{index} names {shard!r}, which is not a plain file name; fix it.")
        yield directory / shard


def save_drafter(
    drafter: BlockDrafter, directory: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a drafter directory that stock SGLang, z-lab DFlash and `load_drafter` read.

    The directory is replaced as a whole.

    Raises:
        AdaSpecError: if a weight is not finite; nothing is written then.
    """
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in drafter.named_parameters()
    }
    check_tensors(tensors, {name: t.shape for name, t in tensors.items()}, "the drafter")
    config = render_config(drafter.config, str(dtype).removeprefix("torch."))
    with replace_directory(directory) as staging:
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, staging / WEIGHTS_NAME, metadata={"format": "pt"})
