"""Prompt files: JSON lines with `prompt`, or `turns` for a conversation."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from adaspec.errors import AdaSpecError


class Prompt(msgspec.Struct, frozen=True):
    """What a user says, turn by turn; other fields of the line are ignored."""

    prompt: str = ""
    turns: tuple[str, ...] = ()

    @property
    def user_turns(self) -> tuple[str, ...]:
        """The turns; a plain prompt is a conversation of one."""
        return self.turns or (self.prompt,)


def load_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """Read prompt files.

    Raises:
        AdaSpecError: naming the file and line that cannot be read, or a file without prompts.
    """
    prompts: list[Prompt] = []
    decoder = msgspec.json.Decoder(Prompt)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AdaSpecError(f"the prompt file {path} cannot be read ({error}).") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompt = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise AdaSpecError(
                    f"{path}:{number} is not a JSON object with a prompt ({error})."
                ) from None
            if not all(turn.strip() for turn in prompt.user_turns):
                raise AdaSpecError(f"{path}:{number} has neither a prompt nor turns with text.")
            prompts.append(prompt)
    if not prompts:
        raise AdaSpecError("the prompt files hold no prompts; give JSON lines with a prompt each.")
    return prompts
