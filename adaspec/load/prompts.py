"""Prompt files: JSON lines with a string under ``prompt``; other keys are ignored."""

from importlib import resources
from pathlib import Path

import msgspec

from adaspec.errors import AdaSpecError


class _PromptLine(msgspec.Struct, frozen=True):
    prompt: str


def load_prompts(path: Path | None = None) -> tuple[str, ...]:
    """Prompts of a file, in its order; without a path, a small mixed set that ships with AdaSpec.

    Raises:
        AdaSpecError: if the file is missing, empty, or has a line without a ``prompt`` string.
    """
    source = path if path is not None else resources.files("adaspec.load") / "prompts.jsonl"
    try:
        lines = source.read_bytes().splitlines()
    except OSError as error:
        raise AdaSpecError(
            f"cannot read the prompts in {source}: {error.strerror}; give a JSONL file."
        ) from error
    decoder = msgspec.json.Decoder(_PromptLine)
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(decoder.decode(line).prompt)
        except msgspec.DecodeError as error:
            raise AdaSpecError(
                f"line {number} of {source} is not a prompt ({error}); "
                'every line must be like {"prompt": "..."}.'
            ) from error
    if not prompts:
        raise AdaSpecError(f"{source} holds no prompt; give a JSONL file with at least one line.")
    return tuple(prompts)
