"""An objective that the settings name by its code."""

from dataclasses import dataclass

from torch import Tensor

from adaspec.errors import AdaSpecError
from online.objectives.rows import Objective, RowLoss, Rows


@dataclass(frozen=True)
class Custom:
    """An objective whose answers are checked: a loss of another shape would be broadcast unseen.

    Attributes:
        objective: the user's.
        factory: what made it, for errors.
    """

    objective: Objective
    factory: str

    def __call__(self, rows: Rows) -> RowLoss:
        """Losses and gradient of each row.

        Raises:
            AdaSpecError: if the answer is no `RowLoss`, or a tensor in it has another shape.
        """
        result = self.objective(rows)
        if not isinstance(result, RowLoss):
            raise AdaSpecError(
                f'the objective of "{self.factory}" returned an object of type '
                f"{type(result).__name__}; let it return a RowLoss."
            )
        column, matrix = rows.labels.shape, rows.log_probs.shape
        for name, shape in (("losses", column), ("slopes", matrix), ("divergences", column)):
            part: Tensor = getattr(result, name)
            if part.shape != shape:
                raise AdaSpecError(
                    f'the objective of "{self.factory}" returned {name} of shape '
                    f"{list(part.shape)} instead of {list(shape)}; correct it."
                )
        return result
