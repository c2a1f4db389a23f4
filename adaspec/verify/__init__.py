"""How many tokens of a draft block the target verifies, chosen anew for every step."""

from adaspec.verify.allocation import allocate
from adaspec.verify.calibration import CalibrationReport
from adaspec.verify.cost import CostModel, CostSample, CostTable
from adaspec.verify.goodput import GoodputPolicy, GoodputState
from adaspec.verify.policies import VerifyPolicy, make_policy
from adaspec.verify.step import (
    Allocation,
    DraftSignals,
    StepLoad,
    StepOutcome,
    StepPlan,
    VerifyShapes,
)
from adaspec.verify.survival import SurvivalModel

__all__ = [
    "Allocation",
    "CalibrationReport",
    "CostModel",
    "CostSample",
    "CostTable",
    "DraftSignals",
    "GoodputPolicy",
    "GoodputState",
    "StepLoad",
    "StepOutcome",
    "StepPlan",
    "SurvivalModel",
    "VerifyPolicy",
    "VerifyShapes",
    "allocate",
    "make_policy",
]
