"""Update rules: what a gradient does to the weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from adaspec.errors import AdaSpecError
from online.config import OptimiserSection

# Share of the past in an average hint.
_HINT_MEMORY = 0.9


class Optimiser:
    """Online gradient descent, plain or preconditioned by AdamW, and its optimistic form.

    The optimistic rule keeps an auxiliary iterate u, and plays w, where the gradient g is taken:

        u <- u - eta g(w),    w = u - eta M,

    with the hint M, a guess of the next gradient from past ones (OnlineSPEC, arXiv 2603.12617;
    Rakhlin and Sridharan 2013). Its regret grows with how far the hints are off, so it gains where
    consecutive gradients are alike. It is not momentum: u moves by g alone. Under AdamW g and M are
    preconditioned (Daskalakis et al. 2018), the weight decay included.

    Args:
        parameters: by name; changed in place.
        of_head: names that learn at the length head's rate.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        of_head: frozenset[str],
        settings: OptimiserSection,
    ) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self._taken = 0
        groups = [
            {"params": [p for n, p in parameters.items() if (n in of_head) == is_head]}
            for is_head in (False, True)
        ]
        self._inner: torch.optim.Optimizer
        if settings.rule == "adamw":
            self._inner = torch.optim.AdamW(
                groups,
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                weight_decay=settings.weight_decay,
            )
        else:
            self._inner = torch.optim.SGD(
                groups, lr=settings.learning_rate, weight_decay=settings.weight_decay
            )
        self._auxiliary: dict[str, Tensor] = {}
        self._hints: dict[str, Tensor] = {}

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._taken

    def clip(self) -> Tensor:
        """Shorten the gradients to the permitted norm; their norms before: float32 ``[groups]``.

        The head's apart: it reads detached states, and neither should shorten the other's step.
        """
        norms = [
            torch.nn.utils.clip_grad_norm_(group["params"], self._settings.clip_norm)
            for group in self._inner.param_groups
            if group["params"]
        ]
        return torch.stack(norms)

    def clear(self) -> None:
        """Forget the gradients."""
        self._inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients."""
        self._set_rates()
        self._taken += 1
        if self._settings.hint == "none":
            self._inner.step()
            return
        before = {
            name: self._auxiliary.get(name, p).clone() for name, p in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            parameter.copy_(before[name])
        self._inner.step()
        for name, parameter in self._parameters.items():
            moved = parameter - before[name]
            if self._settings.hint == "average" and name in self._hints:
                moved = self._hints[name].lerp(moved, 1 - _HINT_MEMORY)
            self._auxiliary[name] = parameter.clone()
            self._hints[name] = moved
            parameter.add_(moved)

    def state_tensors(self) -> dict[str, Tensor]:
        """``mean/NAME``, ``square/NAME``, ``auxiliary/NAME`` and ``hint/NAME``, if they exist."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._inner.state.get(parameter)
            if state and "exp_avg" in state:
                tensors[f"mean/{name}"] = state["exp_avg"]
                tensors[f"square/{name}"] = state["exp_avg_sq"]
        tensors |= {f"auxiliary/{name}": tensor for name, tensor in self._auxiliary.items()}
        return tensors | {f"hint/{name}": tensor for name, tensor in self._hints.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take back what `state_tensors` gave; another rule's are ignored.

        Raises:
            AdaSpecError: if one of a pair is missing, has another shape or is not finite; nothing
                has changed then.
        """
        pairs = [("mean", "square")] * (self._settings.rule == "adamw")
        pairs += [("auxiliary", "hint")] * (self._settings.hint != "none")
        found: list[tuple[str, dict[str, Tensor]]] = []
        for name, parameter in self._parameters.items():
            for pair in pairs:
                saved = [tensors.get(f"{kind}/{name}") for kind in pair]
                if all(tensor is None for tensor in saved):
                    continue
                whole = [t for t in saved if is_whole(t, parameter.shape)]
                if len(whole) < 2:
                    raise AdaSpecError(
                        f"the learner's saved {pair[0]} and {pair[1]} of {name} are damaged; "
                        "delete its state, or let training start again from the live version."
                    )
                found.append((name, dict(zip(pair, whole, strict=True))))  # type: ignore[arg-type]
        self._taken = steps
        for name, saved_pair in found:
            parameter = self._parameters[name]
            here = {kind: t.to(parameter.device, copy=True) for kind, t in saved_pair.items()}
            if "mean" in here:
                self._inner.state[parameter] = {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": here["mean"],
                    "exp_avg_sq": here["square"],
                }
            else:
                self._auxiliary[name], self._hints[name] = here["auxiliary"], here["hint"]

    def _set_rates(self) -> None:
        settings = self._settings
        warm = min(1.0, (self._taken + 1) / (settings.warmup_steps + 1))
        rates = settings.learning_rate, settings.head_learning_rate
        for group, rate in zip(self._inner.param_groups, rates, strict=True):
            group["lr"] = rate * warm


def is_whole(tensor: Tensor | None, shape: torch.Size) -> bool:
    """Whether a tensor is there, of this shape, and finite."""
    return tensor is not None and tensor.shape == shape and bool(torch.isfinite(tensor).all())
