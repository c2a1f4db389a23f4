"""Policies that know nothing of time: fixed, average of accepted lengths, AdaFlash's head."""

import numpy as np
import torch

from adaspec.config import AdaFlashConfig, EmaConfig
from adaspec.errors import AdaSpecError
from adaspec.verify.allocation import allocate, uniform_lengths
from adaspec.verify.step import (
    Allocation,
    DraftSignals,
    Reason,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyShapes,
)


class _UniformPolicy:
    """The same length for all requests of a step."""

    reads_log_probs = False
    reads_length_ratio = False
    _reason: Reason

    def __init__(self, shapes: VerifyShapes, device: torch.device) -> None:
        self._shapes = shapes
        self._device = device

    def _length(self) -> int:
        """Tokens per request, anchor included."""
        raise NotImplementedError

    def plan(self, load: StepLoad) -> StepPlan:
        """See `VerifyPolicy`."""
        length = self._length()
        return StepPlan(load, length > 1, load.batch * length, length - 1, self._reason)

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        """See `VerifyPolicy`."""
        lengths = uniform_lengths(plan.load.batch, plan.width, self._device)
        return Allocation(lengths, plan.tokens)

    def drafter_changed(self) -> None:
        """See `VerifyPolicy`."""


class FixedPolicy(_UniformPolicy):
    """The same length in every step."""

    _reason = "fixed"

    def __init__(self, length: int, shapes: VerifyShapes, device: torch.device) -> None:
        super().__init__(shapes, device)
        if length > 1 and length not in shapes.uniform_widths:
            raise AdaSpecError(
                f"verify.length is {length}, which this server has no graphs for; set it to 1 or "
                f"one of {', '.join(map(str, shapes.uniform_widths))}."
            )
        self._fixed = length

    def _length(self) -> int:
        return self._fixed

    def observe(self, outcome: StepOutcome) -> None:
        """See `VerifyPolicy`."""


class EmaPolicy(_UniformPolicy):
    """A little more than requests accepted on average lately (as SGLang pull request 24596).

    ``length = clamp(⌈1 + average accepted drafts + margin⌉, 2, block)``, rounded up to a width that
    the server can run. Drafting is never switched off.
    """

    _reason = "average"

    def __init__(self, config: EmaConfig, shapes: VerifyShapes, device: torch.device) -> None:
        super().__init__(shapes, device)
        self._config = config
        self._average: float | None = None

    def _length(self) -> int:
        widths = self._shapes.uniform_widths
        if self._average is None:
            return int(widths[-1])
        wanted = np.ceil(1 + self._average + self._config.margin)
        return int(widths[min(np.searchsorted(widths, wanted), len(widths) - 1)])

    def observe(self, outcome: StepOutcome) -> None:
        """See `VerifyPolicy`."""
        if outcome.accepted is None or len(outcome.accepted) == 0:
            return
        mean = float(outcome.accepted.mean())
        old = mean if self._average is None else self._average
        self._average = old + self._config.weight * (mean - old)

    def drafter_changed(self) -> None:
        """Start from the whole block again."""
        self._average = None


class AdaFlashPolicy:
    """AdaFlash's length head (arXiv 2607.19223).

    The length is ``clamp(round(ratio · block · rate), minimum, block)``. As published, an
    exponential average smooths the length of the batch. Within the total that follows from it,
    requests get lengths that differ as their own do. The number of requests from which the
    published server uses the head (more than 48) is a setting here; below it the whole block is
    verified.
    """

    reads_log_probs = False
    reads_length_ratio = True

    def __init__(self, config: AdaFlashConfig, shapes: VerifyShapes, device: torch.device) -> None:
        self._config = config
        self._shapes = shapes
        self._device = device
        self._average = float(shapes.block_size)

    def plan(self, load: StepLoad) -> StepPlan:
        """See `VerifyPolicy`."""
        return StepPlan(load, True, self._tokens(load.batch), self._shapes.block_size - 1, "head")

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        """See `VerifyPolicy`. Requires `DraftSignals.length_ratio`."""
        ratio = signals.length_ratio
        if ratio is None:
            raise ValueError("the adaflash policy needs the outputs of the length head")
        config, block = self._config, self._shapes.block_size
        lengths = (ratio.float() * (block * config.rate)).round().clamp(config.minimum, block)
        batch, tokens = plan.load.batch, plan.tokens
        if self._shapes.on_host:
            self._smooth(float(lengths.mean()))
            tokens = self._tokens(batch)
        if not self._shapes.ragged:
            return Allocation(uniform_lengths(batch, tokens // batch, self._device), tokens)
        # Every request gets its length, give or take what the total is off by.
        position = torch.arange(1, block, device=lengths.device)
        return Allocation(allocate(lengths[:, None] - position, tokens), tokens)

    def observe(self, outcome: StepOutcome) -> None:
        """See `VerifyPolicy`."""
        if outcome.length_ratio is not None and not self._shapes.on_host:
            config, block = self._config, self._shapes.block_size
            lengths = np.round(outcome.length_ratio * (block * config.rate))
            self._smooth(float(lengths.clip(config.minimum, block).mean()))

    def drafter_changed(self) -> None:
        """See `VerifyPolicy`; the head is part of the drafter, so its lengths follow."""

    def _smooth(self, length: float) -> None:
        self._average += self._config.ema * (length - self._average)

    def _tokens(self, batch: int) -> int:
        totals = self._shapes.totals(batch)
        if batch < self._config.from_batch:
            return int(totals[-1])
        wanted = int(np.searchsorted(totals, batch * self._average))
        return int(totals[min(max(wanted, 1), len(totals) - 1)])
