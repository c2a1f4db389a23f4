"""The learner's log of why versions went live or did not, and its last lines.

The log is a file of the version store, so only a monitor on the same machine can read it. Loads no
model library: `adaspec monitor` starts at once.
"""

import os
from pathlib import Path

import msgspec

DECISIONS_NAME = "decisions.jsonl"

_MOST_BYTES = 1 << 16  # read from its end
_MOST_SHOWN = 8


class Decision(msgspec.Struct, frozen=True):
    """One decision.

    Attributes:
        time: Unix time, seconds.
        live: the version that is live after it.
        action: of the gate; None where an operator or a server decided.
        reason: one sentence.
    """

    time: float
    live: int
    action: str | None
    reason: str


class _Live(msgspec.Struct):
    number: int


class _Verdict(msgspec.Struct):
    action: str
    reason: str


class _Line(msgspec.Struct):
    time: float
    live: _Live
    note: str
    verdict: _Verdict | None = None


def last_decisions(store: Path) -> list[Decision]:
    """The newest decisions of a store, oldest first; none if there is no log yet.

    A line that is being written, or that another version wrote in another form, is left out.
    """
    try:
        with (store / DECISIONS_NAME).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    if size > _MOST_BYTES:
        del lines[0]  # cut off
    decoder = msgspec.json.Decoder(_Line)
    found: list[Decision] = []
    for text in reversed(lines):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError:
            continue
        verdict = line.verdict
        action, reason = (None, line.note) if verdict is None else (verdict.action, verdict.reason)
        found.append(Decision(line.time, line.live.number, action, reason))
        if len(found) == _MOST_SHOWN:
            break
    return found[::-1]
