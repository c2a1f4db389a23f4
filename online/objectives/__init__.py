"""What a drafter learns to do better: objectives on the counted positions of draft blocks.

An objective is a function of `Rows` that gives each row's loss and its gradient by the logits. One
of the user's own is named in the settings (`custom.py`); one that is to come with AdaSpec is a file
like `adaflash.py`, a name in `online.config.ObjectiveSection`, and a line here.
"""

from adaspec.plugins import make_custom
from online.config import ObjectiveSection
from online.objectives.adaflash import AdaFlash
from online.objectives.custom import Custom
from online.objectives.loss import ObjectiveResult, objective_loss
from online.objectives.negatives import WithNegatives
from online.objectives.osd import OSD
from online.objectives.rows import Objective, RowLoss, Rows
from online.objectives.survival import Survival

__all__ = [
    "Objective",
    "ObjectiveResult",
    "RowLoss",
    "Rows",
    "build_objective",
    "objective_loss",
]


def build_objective(config: ObjectiveSection) -> Objective:
    """The objective that the settings name.

    Raises:
        AdaSpecError: if the code that a custom one is to be made by cannot be found, or makes
            something that cannot be called.
    """
    objective: Objective
    if config.kind == "adaflash":
        objective = AdaFlash(config.alpha, config.clip, config.clip_order)
    elif config.kind == "osd":
        objective = OSD(config.divergence, config.wrong_only)
    elif config.kind == "survival":
        objective = Survival(config.smoothing)
    else:
        assert config.factory is not None  # `ObjectiveSection` sees to it
        own = make_custom(config.factory, "objective.factory", ("__call__",), config)
        objective = Custom(own, config.factory)
    return WithNegatives(objective, config.negatives) if config.negatives else objective
