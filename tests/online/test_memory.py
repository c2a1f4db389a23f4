import numpy as np
import torch
from torch import Tensor

from online.memory import Memory


def weights(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((2,), value), "v": torch.full((3,), value)}


class Traffic:
    """How the base fares on traffic of a level, while what is played counts up."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rng = np.random.default_rng(0)
        self.played = 0

    def serve(self, level: float, requests: int) -> list[int]:
        """Slots filled, in order."""
        filled = []
        for _ in range(requests):
            self.played += 1
            slot = self.memory.observe(
                float(self.rng.normal(level, 0.03)), lambda: weights(self.played)
            )
            if slot is not None:
                filled.append(slot)
        return filled


def test_drift_keeps_what_was_played_before_it() -> None:
    traffic = Traffic(Memory(slots=2, drift=16.0))
    assert traffic.serve(0.4, 200) == []
    assert traffic.memory.kept == [None, None]
    assert traffic.serve(0.6, 40) == [0]
    (kept, nothing) = traffic.memory.kept
    assert nothing is None
    assert kept is not None
    assert 100 < float(kept["w"][0]) <= 200


def test_the_oldest_gives_way() -> None:
    traffic = Traffic(Memory(slots=2, drift=16.0))
    filled = [traffic.serve(level, 200) for level in (0.4, 0.6, 0.4, 0.6)]
    assert filled == [[], [0], [1], [0]]
    first, second = traffic.memory.kept
    assert first is not None
    assert second is not None
    assert float(first["w"][0]) > 400
    assert 200 < float(second["w"][0]) <= 400


def test_without_slots_nothing_is_kept() -> None:
    traffic = Traffic(Memory(slots=0, drift=16.0))
    assert traffic.serve(0.4, 100) + traffic.serve(0.9, 100) == []
    assert traffic.memory.state_tensors() == {}


def test_a_restart_remembers_whole_sets_only() -> None:
    traffic = Traffic(Memory(slots=2, drift=16.0))
    for level in (0.4, 0.6, 0.4):
        traffic.serve(level, 200)
    saved = traffic.memory.state_tensors()
    resumed = Memory(slots=2, drift=16.0)
    del saved["1/v"]
    resumed.load_state_tensors(saved, weights(0))
    assert resumed.kept[1] is None
    assert resumed.kept[0] is not None
    assert torch.equal(resumed.kept[0]["w"], saved["0/w"])
