"""What a drafter was trained with, in ``origin.json`` beside its weights.

A drafter that meets another target, chat template or output head than it was trained with is
served without an error and accepts little. Its origin lets a server say so, and tells it how much
to expect. Marks are digests and samples: they are read within a second from a target of any size,
and hold nothing of it. The file is no part of the model; other loaders ignore it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaspec.drafters.checkpoint import read_model_config
from adaspec.errors import AdaSpecError
from adaspec.files import read_bounded

ORIGIN_NAME = "origin.json"
Part = Literal["target", "tokenizer", "template", "taps", "head"]

_MOST_BYTES = 1 << 20
_ROWS_OF_A_TENSOR = 4
_ROWS_OF_THE_HEAD = 32
# Between float32 and bfloat16 the projections of a head's rows differ by 0.2 %, after rounding to
# 8 bits by about 1 %, to fp8 by 3 % and to 4 bits by 10 %.
_MOST_HEAD_DIFFERENCE = 0.02


class TargetMarks(msgspec.Struct, frozen=True, kw_only=True):
    """By what a target is known again; None where its directory does not tell.

    Attributes:
        weights: SHA-256 over names, types, shapes and four rows of every tensor.
        vocabulary: SHA-256 over the tokens and their ids.
        template: SHA-256 over the chat template.
        quantisation: SGLang's name of the method, or None for plain floats.
        head: a projection of each of 32 rows of the output matrix (`head_sketch`); empty if that
            is not stored in plain floats.
    """

    weights: str | None
    vocabulary: str | None
    template: str | None
    quantisation: str | None
    head: tuple[float, ...]


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter accepted before it was given away.

    Attributes:
        committed_per_pass: tokens of an average target pass that verifies the whole block.
        survival: share of blocks whose first k drafts were all accepted, k = 1 .. block - 1.
        setting: on what that was measured.
    """

    committed_per_pass: float
    survival: tuple[float, ...]
    setting: str

    def accepted_by_length(self) -> tuple[float, ...]:
        """Accepted drafts to expect of a pass, by its verify length 0 .. block.

        ``survival`` is over all tokens of the answers, ``committed_per_pass`` over those where
        passes start, so the one gives the proportions and the other the scale.
        """
        sums = [0.0, 0.0]
        for share in self.survival:
            sums.append(sums[-1] + share)
        scale = (self.committed_per_pass - 1) / sums[-1] if sums[-1] > 0 else 0.0
        return tuple(scale * value for value in sums)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter was trained with.

    Attributes:
        taps: ``target_layer_ids`` it was trained with.
        expected: None if it was not measured.
    """

    target: TargetMarks
    taps: tuple[int, ...]
    expected: Expectation | None = None


class Mismatch(msgspec.Struct, frozen=True):
    """A part that is not what the drafter was trained with, and a sentence that says so."""

    part: Part
    sentence: str


def read_origin(drafter: Path) -> Origin | None:
    """The origin of a drafter directory, or None if it has none.

    Raises:
        AdaSpecError: if the file is damaged.
    """
    path = drafter / ORIGIN_NAME
    try:
        return msgspec.json.decode(read_bounded(path, _MOST_BYTES), type=Origin)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise AdaSpecError(
            f"{path} is damaged ({error}); restore it, or delete it to serve the drafter without "
            "knowing what it was trained with."
        ) from error


def write_origin(drafter: Path, origin: Origin) -> None:
    """Put an origin into a drafter directory."""
    path = drafter / ORIGIN_NAME
    fresh = path.with_name(f".{ORIGIN_NAME}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(origin), indent=1) + b"\n")
    os.replace(fresh, path)


def mark_target(target: Path, tokenizer: Path | None = None) -> TargetMarks:
    """Read the marks of a target directory.

    Args:
        tokenizer: directory of the tokenizer, if that is another.

    Raises:
        AdaSpecError: if there is no readable config.json, or the weights are damaged.
    """
    config = read_model_config(target, "target")
    quantisation = (config.get("quantization_config") or {}).get("quant_method")
    weights, head = _mark_weights(target)
    vocabulary, template = _mark_tokenizer(tokenizer or target)
    return TargetMarks(
        weights=weights,
        vocabulary=vocabulary,
        template=template,
        quantisation=quantisation,
        head=head,
    )


def text_digest(text: str) -> str:
    """SHA-256 of a chat template; white space around it does not count."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def head_sketch(
    weight: Tensor, vocabulary: int, first_row: int = 0
) -> tuple[tuple[int, float], ...]:
    """Evenly spaced rows of an output matrix, each projected on a fixed pattern of signs.

    Args:
        weight: ``[rows, hidden]``, all of the matrix or a shard of it, on any device; waits for it.
        vocabulary: rows of the whole matrix, without padding.
        first_row: of the shard.

    Returns:
        Number (of 32) and projection of the sampled rows that lie in the shard.
    """
    chosen = [
        (i, row - first_row)
        for i, row in enumerate(_head_rows(vocabulary))
        if 0 <= row - first_row < weight.shape[0]
    ]
    rows = torch.tensor([row for _, row in chosen], dtype=torch.long, device=weight.device)
    projected = (weight.detach()[rows].float().cpu() @ _signs(weight.shape[1])).tolist()
    return tuple((i, value) for (i, _), value in zip(chosen, projected, strict=True))


def head_differs(expected: Sequence[float], sketch: Sequence[tuple[int, float]]) -> bool:
    """Whether an output matrix is another, or much more coarsely rounded, than the expected one."""
    pairs = [(expected[i], value) for i, value in sketch if i < len(expected)]
    size = sum(left**2 for left, _ in pairs)
    return sum((a - b) ** 2 for a, b in pairs) > _MOST_HEAD_DIFFERENCE**2 * size


def compare(origin: Origin, served: TargetMarks, taps: Sequence[int]) -> list[Mismatch]:
    """What is served otherwise than it was trained, the likelier cause of a collapse first.

    Args:
        served: marks of the target in front of the drafter.
        taps: ``target_layer_ids`` in the drafter's configuration.
    """
    trained = origin.target
    found = []
    if tuple(taps) != origin.taps:
        found.append(
            Mismatch(
                "taps",
                f"the drafter taps the target's layers {list(taps)} but was trained with "
                f"{list(origin.taps)}; restore target_layer_ids in its config.json",
            )
        )
    quantised = served.quantisation != trained.quantisation
    if quantised:
        found.append(
            Mismatch(
                "head",
                f"the target's weights are {_named(served.quantisation)}, but the drafter was "
                f"trained with {_named(trained.quantisation)} ones; serve the target it was "
                "trained for, or train a drafter for this one",
            )
        )
    if not quantised and _differ(served.weights, trained.weights):
        found.append(
            Mismatch(
                "target",
                "the drafter was trained for another target than this one, or for other weights of "
                "it; serve its target, or train a drafter for this one",
            )
        )
    if _differ(served.vocabulary, trained.vocabulary):
        found.append(
            Mismatch(
                "tokenizer",
                "the drafter was trained with another tokenizer than this server's; give the "
                "target's own",
            )
        )
    if _differ(served.template, trained.template):
        found.append(
            Mismatch(
                "template",
                "the drafter was trained with another chat template than this server's; serve with "
                "that of its training, or train on answers of this server",
            )
        )
    return found


def _named(quantisation: str | None) -> str:
    return f"{quantisation}-quantised" if quantisation else "unquantised"


def _differ(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left != right


def _mark_weights(target: Path) -> tuple[str | None, tuple[float, ...]]:
    digest = hashlib.sha256()
    head: tuple[float, ...] = ()
    names: list[tuple[str, Any]] = []
    with ExitStack() as files:
        try:
            for path in sorted(target.glob("*.safetensors")):
                file = files.enter_context(safe_open(path, framework="pt"))
                names += [(name, file) for name in file.keys()]  # noqa: SIM118 - no mapping
            for name, file in sorted(names, key=lambda pair: pair[0]):
                for part in _sample(name, file):
                    digest.update(part)
            head = _sketch_of(dict(names))
        except (SafetensorError, OSError) as error:
            raise AdaSpecError(
                f"the weights in {target} cannot be read ({error}); restore the files."
            ) from error
    return (digest.hexdigest() if names else None), head


def _sample(name: str, file: Any) -> Iterator[bytes]:
    view = file.get_slice(name)
    shape = list(view.get_shape())
    yield f"{name}|{view.get_dtype()}|{shape}|".encode()
    if not shape:
        parts = [file.get_tensor(name)]
    else:
        rows = sorted({i * shape[0] // _ROWS_OF_A_TENSOR for i in range(_ROWS_OF_A_TENSOR)})
        parts = [view[row : row + 1] for row in rows if row < shape[0]]
    for part in parts:
        yield part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _sketch_of(files: dict[str, Any]) -> tuple[float, ...]:
    found = [n for n in files if n.endswith("lm_head.weight")]
    found += [n for n in files if n.endswith("embed_tokens.weight")]  # tied
    if not found:
        return ()
    view = files[found[0]].get_slice(found[0])
    vocabulary, hidden = view.get_shape()
    rows = torch.cat([view[row : row + 1] for row in _head_rows(vocabulary)])
    if not rows.is_floating_point():
        return ()
    return tuple((rows.float() @ _signs(hidden)).tolist())


def _head_rows(vocabulary: int) -> list[int]:
    return [i * vocabulary // _ROWS_OF_THE_HEAD for i in range(_ROWS_OF_THE_HEAD)]


def _signs(width: int) -> Tensor:
    """A fixed pattern of +1 and -1, float32 ``[width]``: bits of multiples of Knuth's constant."""
    return torch.tensor([1.0 if (i * 2654435761 >> 15) & 1 else -1.0 for i in range(width)])


def _mark_tokenizer(directory: Path) -> tuple[str | None, str | None]:
    """Digests of vocabulary and chat template."""
    fast, settings = _json(directory / "tokenizer.json"), _json(directory / "tokenizer_config.json")
    vocabulary = None
    if fast:
        added = [(token["content"], token["id"]) for token in fast.get("added_tokens", ())]
        tokens = fast.get("model", {}).get("vocab", ())
        tokens = sorted(tokens.items()) if isinstance(tokens, dict) else tokens
        vocabulary = text_digest(json.dumps([tokens, added]))
    beside = directory / "chat_template.jinja"
    template = beside.read_text(encoding="utf-8") if beside.is_file() else None
    template = template or _json(directory / "chat_template.json").get("chat_template")
    template = template or settings.get("chat_template")
    if template is not None and not isinstance(template, str):  # several, by name
        template = json.dumps(template, sort_keys=True)
    return vocabulary, None if template is None else text_digest(template)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
