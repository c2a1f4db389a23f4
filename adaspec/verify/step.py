"""What a policy of the verify length is told about a step, and what it answers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

Reason = Literal["fixed", "average", "head", "goodput", "no cost data", "exploration", "custom"]

# Totals that are compared when every total is possible; more would not change the rate visibly.
_MOST_TOTALS = 64


@dataclass(frozen=True)
class VerifyShapes:
    """What verify steps a backend can run.

    Attributes:
        block_size: tokens of a draft block, the anchor included.
        max_batch: most requests that run at once.
        ragged: whether the requests of a step can have different lengths.
        on_host: whether draft signals lie in host memory, so that reading them waits for nothing.
        widths: lengths that a uniform step can have, ascending; empty: every one.
        token_tiers: totals of ragged steps with a captured graph, ascending; a step is padded to
            the next. Empty: no padding.
        batch_tiers: batch sizes of plain and uniform steps with a captured graph, ascending; a
            batch is padded to the next. Empty: no padding.
        draft_cost: time of reading one draft off a block, as a share of that of verifying one
            token; 0 if all are read anyhow.
    """

    block_size: int
    max_batch: int
    ragged: bool
    on_host: bool = False
    widths: tuple[int, ...] = ()
    token_tiers: tuple[int, ...] = ()
    batch_tiers: tuple[int, ...] = ()
    draft_cost: float = 0.0

    @cached_property
    def uniform_widths(self) -> Ints:
        """Lengths above 1 that a uniform step can have, ascending."""
        widths = self.widths or range(2, self.block_size + 1)
        return np.array([w for w in widths if 1 < w <= self.block_size], dtype=np.int64)

    def totals(self, batch: int) -> Ints:
        """Totals a drafted step of ``batch`` requests can verify, ascending.

        The first is ``batch`` itself, anchors alone. Up to a graph tier more tokens cost nothing,
        so with tiers the totals are the tiers.
        """
        full = batch * self.block_size
        if not self.ragged:
            return np.concatenate(([batch], batch * self.uniform_widths))
        tiers = [tier for tier in self.token_tiers if tier > batch]
        if tiers:
            totals = [min(tier, full) for tier in tiers]
        else:
            totals = np.linspace(batch, full, min(_MOST_TOTALS, full - batch + 1))[1:].tolist()
        return np.unique(np.array([batch, *totals]).round().astype(np.int64))

    def padded(self, batch: int, tokens: int, drafted: bool) -> int:
        """Tokens a step costs: ``tokens``, and what the captured graph adds."""
        if self.ragged and drafted:
            return _next_tier(tokens, self.token_tiers)
        return _next_tier(batch, self.batch_tiers) * (tokens // batch)

    def work(self, batch: int, tokens: int, drafted: bool, read: int) -> float:
        """What a step costs, in verified tokens.

        `padded`, and the part of a token that reading a draft costs for drafts that are read and
        not verified: where reading is dear, reading more to choose from is another step, not a
        slower one of the same kind.
        """
        spare = batch * (1 + read) - tokens if drafted else 0
        return self.padded(batch, tokens, drafted) + self.draft_cost * max(spare, 0)


def _next_tier(size: int, tiers: tuple[int, ...]) -> int:
    return next((tier for tier in tiers if tier >= size), size)


@dataclass(frozen=True)
class StepLoad:
    """The batch of a step, as the host knows it before the step.

    Attributes:
        requests: ids, in batch order. The same object while the batch does not change saves time.
        context_tokens: committed tokens of all requests; may be a step old.
        sampled: bool ``[batch]``, requests that are not greedy.
    """

    requests: tuple[str, ...]
    context_tokens: int
    sampled: Flags

    @property
    def batch(self) -> int:
        """Number of requests."""
        return len(self.requests)


@dataclass(frozen=True)
class StepPlan:
    """What is decided before the draft pass.

    Attributes:
        load: the batch this was decided for.
        drafted: whether there is a draft pass; without it the step is plain decoding.
        tokens: tokens to verify, anchors included: the batch size if nothing is drafted.
        drafts: drafts of each block that may be verified; no more need to be read off the block.
        reason: what decided.
        rate: committed tokens per second that are expected; 0 if the policy does not know.
        teaches: whether the policy learns from the step; if not, its signals need not be brought to
            the host.
    """

    load: StepLoad
    drafted: bool
    tokens: int
    drafts: int
    reason: Reason
    rate: float = 0.0
    teaches: bool = True

    @property
    def width(self) -> int:
        """Tokens per request of a uniform step."""
        return self.tokens // self.load.batch


@dataclass(frozen=True)
class DraftSignals:
    """What the draft pass says about its drafts; a policy asks for it by `reads_…`.

    Attributes:
        log_probs: float32 ``[batch, plan.drafts]``, the drafter's log-probability of each draft
            that was read; None if not asked for, or not to be had.
        length_ratio: float32 ``[batch]``, output of the length head (`LengthHead`); None if not
            asked for, or the drafter has no such head.
    """

    log_probs: Tensor | None = None
    length_ratio: Tensor | None = None


@dataclass(frozen=True)
class Allocation:
    """How the verified tokens are shared out.

    Attributes:
        lengths: int32 ``[batch]`` on the device of the signals, 1 to the block size, anchors
            included.
        tokens: their sum, known without reading ``lengths``.
    """

    lengths: Tensor
    tokens: int


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step; reaches the host one or two steps later.

    Attributes:
        plan: of the step.
        tokens: tokens verified, as allocated.
        seconds: the step's share of wall time, or None if it says nothing about steps of its kind
            (a prefill in between, a compilation, a draft cache that had to catch up).
        lengths: ``[batch]``, verify lengths; None if nothing was drafted.
        accepted: ``[batch]``, accepted drafts.
        signals: the draft signals the policy asked for, as host arrays of the same shapes.
    """

    plan: StepPlan
    tokens: int
    seconds: float | None
    lengths: Ints | None = None
    accepted: Ints | None = None
    log_probs: Floats | None = None
    length_ratio: Floats | None = None
