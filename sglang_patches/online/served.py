"""What is served, and how that changes."""

from dataclasses import dataclass
from typing import Literal

# What the live version can be compared with: ``controlled``: the base in control windows;
# ``alone``: only the traffic before it; ``base``: it is what others are compared with.
Standing = Literal["controlled", "alone", "base"]


@dataclass(frozen=True)
class Served:
    """A version that is, or can be, served.

    Attributes:
        number: within the lineage.
        context_sha256: see `Manifest`.
    """

    number: int
    context_sha256: str


@dataclass(frozen=True)
class Swap:
    """A change of the live weights.

    Attributes:
        version: now live.
        before: live until now.
        rolled_back: it is a return to the trusted version, or from that one to the base.
        context_sha256: of the weights that context K/V are made of, now.
        context_changed: context K/V written before do not fit the version that is now live.
        reason: one sentence.
    """

    version: int
    before: int
    rolled_back: bool
    context_sha256: str
    context_changed: bool
    reason: str
