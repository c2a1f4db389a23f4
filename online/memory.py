"""Drafters of earlier traffic, kept to come back to.

Traffic recurs: day and night, one customer and another. What was learned for it is overwritten by
what comes between. So when traffic drifts, the weights that were played before are kept, as a fixed
expert that can be trusted again within a few requests (Bousquet and Warmuth 2002: mixing past
posteriors). Drift is seen in how the frozen base fares, which learning does not change.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from online.pace import DriftDetector

Weights = dict[str, Tensor]

# Requests between two copies; what is kept is one to two such stretches old when drift is noticed.
_EVERY = 32


class Memory:
    """A few sets of weights, the oldest of which gives way.

    Args:
        slots: sets kept, each in the published types.
        drift: threshold of the detector.
    """

    def __init__(self, slots: int, drift: float) -> None:
        self.kept: list[Weights | None] = [None] * slots
        self._drift = drift
        self._detector = DriftDetector(drift)
        self._next = 0
        self._seen = 0
        self._recent: Weights | None = None
        self._earlier: Weights | None = None

    def observe(self, base_loss: float, played: Callable[[], Weights]) -> int | None:
        """Note how the base fared on a request; the slot that was filled, if traffic has drifted.

        Args:
            played: the weights that are served now; called now and then.
        """
        if not self.kept:
            return None
        if self._seen % _EVERY == 0:
            self._earlier, self._recent = self._recent, played()
        self._seen += 1
        if not self._detector.saw(base_loss):
            return None
        self._detector = DriftDetector(self._drift)
        if self._earlier is None:
            return None
        slot, self._next = self._next, (self._next + 1) % len(self.kept)
        self.kept[slot] = self._earlier
        # What is played now belongs to neither traffic.
        self._earlier = self._recent = None
        self._seen = 0
        return slot

    def state_tensors(self) -> Weights:
        """``SLOT/NAME`` of what is kept."""
        return {
            f"{slot}/{name}": tensor
            for slot, weights in enumerate(self.kept)
            for name, tensor in (weights or {}).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; a set that is not whole is left out."""
        for slot in range(len(self.kept)):
            names = {name: f"{slot}/{name}" for name in like}
            if all(key in tensors and tensors[key].shape == like[name].shape
                   for name, key in names.items()):  # fmt: skip
                self.kept[slot] = {name: tensors[key] for name, key in names.items()}
