"""A boundary that input from elsewhere crosses, as a function of bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from adaspec.errors import AdaSpecError
from tests.fuzz.mutation import Mutation, mutate_bytes

Result = TypeVar("Result")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Target:
    """One boundary.

    Attributes:
        check: gives it these bytes; True if they were accepted, False if they were refused as is
            documented. Anything else that happens is raised: it is what fuzzing looks for.
        seeds: valid inputs, which must be accepted.
        mutate: bends one.
        found: inputs that once went wrong, by what they did.
        examples: bent inputs in a default test run.
        close: gives back what ``check`` holds.
    """

    check: Callable[[bytes], bool]
    seeds: Sequence[bytes]
    mutate: Mutation = mutate_bytes
    found: dict[str, bytes] = field(default_factory=dict)
    examples: int = 150
    close: Callable[[], None] = _nothing


Make = Callable[[Path], Target]
"""Makes a target, given a directory of its own."""


def attempt(act: Callable[[], Result], *kinds: type[Exception]) -> Result | None:
    """What this returns; None if it raises one of these errors.

    The error must say something, and an `AdaSpecError` a sentence. Any other error is raised.
    """
    try:
        return act()
    except kinds as error:
        told, is_sentence = str(error), isinstance(error, AdaSpecError)
    assert told
    assert told.endswith(".") or not is_sentence, told
    return None
