"""Is what is served what the drafter was trained with? Said at the start, never refused."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from huggingface_hub import snapshot_download
from sglang.srt.lora.layers import unwrap_lora_layer
from torch import nn

from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.drafters.origin import (
    Origin,
    TargetMarks,
    compare,
    head_differs,
    head_sketch,
    mark_target,
    read_origin,
    text_digest,
)
from adaspec.errors import AdaSpecError
from sglang_patches.checks import model_directory

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_patches.worker.worker import AdaSpecWorker

logger = logging.getLogger(__name__)

Part = Literal["target", "tokenizer", "template", "taps", "head", "drafter quantised"]


class Difference(msgspec.Struct, frozen=True):
    """A part of the pair that is not as it was in training, and a sentence that says so."""

    part: Part
    sentence: str


def check_pairing(worker: "AdaSpecWorker") -> tuple[Origin | None, list[Difference]]:
    """The drafter's origin, and what is served otherwise; both are logged.

    Only this rank's share of the output matrix is looked at; waits for the device.
    """
    args = worker.server_args
    drafter = model_directory(args.speculative_draft_model_path)
    found = _quantised_drafter(worker.draft_model)
    origin = None
    try:
        origin = read_origin(drafter)
        if origin is not None:
            taps = read_drafter_config(drafter).target_layer_ids
            pairs = compare(origin, _served_marks(args), taps)
            found += [Difference(pair.part, pair.sentence) for pair in pairs]
    except (AdaSpecError, OSError, ValueError) as error:
        logger.warning("what the drafter was trained with is not known: %s", error)
    if not any(difference.part in ("head", "target") for difference in found):
        found += _other_head(worker.model_runner.model, origin)
    for difference in found:
        logger.warning("%s.", difference.sentence)
    return origin, found


def quantised_by(module: nn.Module) -> str | None:
    """Name of the method that a layer's weights are quantised by, or None if they are not."""
    method = getattr(module, "quant_method", None)
    name = type(getattr(method, "_wrapped", method)).__name__  # ours wraps an unquantised one
    return None if method is None or name.startswith("Unquantized") else name


def _quantised_drafter(model: nn.Module) -> list[Difference]:
    methods = sorted({name for module in model.modules() if (name := quantised_by(module))})
    if not methods:
        return []
    sentence = (
        f"the drafter's weights were quantised when they were loaded ({', '.join(methods)}), "
        "though it was trained in plain floats; add --speculative-draft-model-quantization unquant"
    )
    return [Difference("drafter quantised", sentence)]


def _other_head(target: nn.Module, origin: Origin | None) -> list[Difference]:
    """The output matrix in memory, whatever its directory says."""
    head = unwrap_lora_layer(getattr(target, "lm_head", None))
    if head is None:
        return []
    method = quantised_by(head)
    if method is not None:
        sentence = (
            f"the target's output matrix is quantised ({method}) and the drafter, which proposes "
            "through it, was not trained with it so; leave the head out of the quantisation, or "
            "train a drafter for this target"
        )
        return [Difference("head", sentence)]
    weight = getattr(head, "weight", None)
    if origin is None or weight is None or not weight.is_floating_point():
        return []
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        return []
    sketch = head_sketch(weight, head.org_vocab_size, shard.org_vocab_start_index)
    if not head_differs(origin.target.head, sketch):
        return []
    sentence = (
        "the target's output matrix in memory is not the one the drafter was trained with: it was "
        "rounded or replaced when it was loaded; serve the target as it was in training"
    )
    return [Difference("head", sentence)]


def _served_marks(args: "ServerArgs") -> TargetMarks:
    tokenizer = args.tokenizer_path or args.model_path
    marks = mark_target(_local_directory(args.model_path), _local_directory(tokenizer))
    if args.chat_template is not None:
        given = Path(args.chat_template).expanduser()
        text = given.read_text(encoding="utf-8") if given.is_file() else args.chat_template
        marks = msgspec.structs.replace(marks, template=text_digest(text))
    # A checkpoint that is quantised already names its method, and SGLang may name it otherwise.
    if marks.quantisation is None and args.quantization not in (None, "unquant"):
        marks = msgspec.structs.replace(marks, quantisation=args.quantization)
    return marks


def _local_directory(model: str) -> Path:
    """Where SGLang has loaded a model from; unlike `model_directory`, this downloads no more.

    Raises:
        OSError: if a model of the hub is not in the cache.
    """
    path = Path(model).expanduser()
    return path if path.is_dir() else Path(snapshot_download(model, local_files_only=True))
