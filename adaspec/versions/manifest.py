"""What is written beside a drafter version, and the pointer that says which version is live."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Mode = Literal["frozen-kv", "full"]
Action = Literal["publish", "keep", "base"]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Lineage = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
VersionNumber = Annotated[int, Meta(ge=0, lt=10**8)]
Count = Annotated[int, Meta(ge=0)]


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TensorInfo(_Document, frozen=True, kw_only=True):
    """Type and shape of one weight."""

    dtype: Literal["float32", "bfloat16", "float16"]
    shape: tuple[int, ...]


class Interval(_Document, frozen=True, kw_only=True):
    """A point estimate and its bootstrap interval."""

    estimate: float
    low: float
    high: float


class GateVerdict(_Document, frozen=True, kw_only=True):
    """A candidate compared with what is served, on recent feedback that was never trained on.

    Attributes:
        action: ``publish`` the candidate, ``keep`` the incumbent, or go back to the ``base``.
        reason: one sentence.
        incumbent_number: version the candidate was compared with.
        requests: held-back requests replayed.
        candidate, incumbent, base: committed tokens per target pass of each in the replay.
        over_incumbent, over_base: relative gain of the candidate, paired by request.
        incumbent_over_base: relative gain of the incumbent.
        confidence: of the intervals.
    """

    action: Action
    reason: str
    incumbent_number: VersionNumber
    requests: Count
    candidate: float
    incumbent: float
    base: float
    over_incumbent: Interval
    over_base: Interval
    incumbent_over_base: Interval
    confidence: float


class Provenance(_Document, frozen=True, kw_only=True):
    """How a version came about.

    Attributes:
        parent: version the training continued from; None for the base.
        mode: ``frozen-kv`` if every weight that context K/V are made of is the base's.
        objective, optimiser: settings, in words.
        steps: optimiser steps since the base.
        tokens_seen: response tokens trained on since the base, repeats counted.
        gate: the verdict that let it pass; None for the base.
    """

    parent: VersionNumber | None
    mode: Mode
    objective: str
    optimiser: str
    steps: Count
    tokens_seen: Count
    gate: GateVerdict | None


class Manifest(_Document, frozen=True, kw_only=True):
    """Everything about an immutable version except its weights.

    Attributes:
        lineage: `lineage_of` of the base; numbers count within it.
        sha256: of the weights file.
        context_sha256: `context_digest` of the weights that context K/V are made of. Two versions
            that agree here can share a draft KV cache.
        tensors: every weight by name.
        created_at: UTC, ISO 8601.
    """

    format: Literal[1] = 1
    lineage: Lineage
    number: VersionNumber
    sha256: Sha256
    context_sha256: Sha256
    tensors: dict[str, TensorInfo]
    created_at: str
    provenance: Provenance


class Pointer(_Document, frozen=True, kw_only=True):
    """Which version is live.

    Attributes:
        sequence: grows with every change of the pointer, also when an older version comes back.
        number: the live version.
        sha256: of its weights file.
        reason: why it was chosen, one sentence.
    """

    format: Literal[1] = 1
    lineage: Lineage
    sequence: Count
    number: VersionNumber
    sha256: Sha256
    reason: str


def describe(section: msgspec.Struct) -> str:
    """Settings as ``key=value`` words, for `Provenance`."""
    return " ".join(f"{key}={value}" for key, value in msgspec.to_builtins(section).items())
