"""The policies of the verify length behind one interface, and how the configuration names them."""

from typing import Protocol

import torch

from adaspec.config import VerifyConfig
from adaspec.plugins import make_custom, members_of
from adaspec.verify.goodput import GoodputPolicy
from adaspec.verify.simple import AdaFlashPolicy, EmaPolicy, FixedPolicy
from adaspec.verify.step import (
    Allocation,
    DraftSignals,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyShapes,
)


class VerifyPolicy(Protocol):
    """Chooses how many tokens of each draft block the target verifies.

    The calls of a step: `plan` on the host before the draft pass; `allocate` after it, if the plan
    drafts; `observe` when the step's results have reached the host, in the order of the steps. None
    of them waits for the device. What it reads is asked once, before the first step.
    """

    @property
    def reads_log_probs(self) -> bool:
        """Whether it wants `DraftSignals.log_probs`."""

    @property
    def reads_length_ratio(self) -> bool:
        """Whether it wants `DraftSignals.length_ratio`."""

    def plan(self, load: StepLoad) -> StepPlan:
        """Whether to draft, and how many tokens to verify."""

    def allocate(self, plan: StepPlan, signals: DraftSignals) -> Allocation:
        """Share the planned tokens out; a policy that may read them can change their number."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step."""

    def drafter_changed(self) -> None:
        """Other drafter weights are served from now on."""


def make_policy(
    config: VerifyConfig, shapes: VerifyShapes, device: torch.device, has_confidence: bool = True
) -> VerifyPolicy:
    """The policy that the configuration names.

    Args:
        device: of the draft signals.
        has_confidence: whether the drafter's log-probabilities can be had; `goodput` does without
            them, less well.

    Raises:
        AdaSpecError: if the configured length does not fit the block; if the code that a custom
            policy is to be made by cannot be found, or makes something else.
    """
    match config.policy:
        case "fixed":
            return FixedPolicy(config.width(shapes.block_size), shapes, device)
        case "ema":
            return EmaPolicy(config.ema, shapes, device)
        case "adaflash":
            return AdaFlashPolicy(config.adaflash, shapes, device)
        case "goodput":
            return GoodputPolicy(config.goodput, shapes, device, has_confidence)
        case "custom":
            assert config.factory is not None  # `VerifyConfig` sees to it
            policy: VerifyPolicy = make_custom(
                config.factory,
                "verify.factory",
                members_of(VerifyPolicy),
                shapes,
                device,
                has_confidence,
            )
            return policy
