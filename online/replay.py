"""Finished trajectories in memory: to learn from, and to judge by first.

A share of requests is held back for good. The others are judged by while they are fresh and learned
from afterwards (test, then train: Dawid's prequential principle, 1984), so that a candidate is
judged by the traffic of the moment, and nothing of it is lost to learning.
"""

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from adaspec.feedback import in_share
from online.config import ReplaySection
from online.trajectory import Trajectory


class ReplayBuffer:
    """Two pools under one memory cap; filled by the intake thread, read by the learner.

    A request is held back by its id, so that it is never in both pools, whatever is restarted.
    """

    def __init__(self, config: ReplaySection) -> None:
        self._half_life = config.half_life
        self._held_back = config.held_back
        self._fresh = config.fresh
        self._lock = threading.Lock()
        self._training = _Pool(int(config.bytes * (1 - config.held_back)))
        self._held = _Pool(int(config.bytes * config.held_back))
        self._arrivals = 0
        self._new = 0

    def add(self, trajectory: Trajectory) -> None:
        """Store a trajectory; older ones give way."""
        held = in_share(trajectory.request, self._held_back, "held-back")
        with self._lock:
            if held:
                self._held.add(trajectory)
            else:
                self._training.add(trajectory)
                self._arrivals += 1
                self._new += 1

    def take_new(self) -> list[Trajectory]:
        """Training trajectories that have come since, oldest first."""
        with self._lock:
            new, self._new = min(self._new, len(self._training.items)), 0
            return list(self._training.items)[-new:] if new else []

    def draw(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
        """Training trajectories, recent ones more often: with replacement, ``count`` of them.

        Never the fresh ones, nor those that were not taken as new yet.
        """
        with self._lock:
            items = list(self._training.items)
            del items[max(0, len(items) - max(self._new, self._fresh)) :]
        if not items:
            return []
        age = np.arange(len(items))[::-1]
        weights = 0.5 ** (age / self._half_life)
        chosen = rng.choice(len(items), size=count, p=weights / weights.sum())
        return [items[index] for index in chosen]

    def unseen(self, limit: int) -> Sequence[Trajectory]:
        """Trajectories that were never drawn, at most ``limit``: fresh ones first, then the newest
        held back.
        """
        with self._lock:
            fresh = _last(self._training.items, min(self._fresh, limit))
            return fresh + _last(self._held.items, limit - len(fresh))

    @property
    def released(self) -> int:
        """Trajectories that could be drawn since start."""
        return max(0, self._arrivals - self._fresh)

    def sizes(self) -> tuple[int, int, int]:
        """Training trajectories, held-back trajectories, and bytes of both."""
        with self._lock:
            nbytes = self._training.nbytes + self._held.nbytes
            return len(self._training.items), len(self._held.items), nbytes


def _last(items: Sequence[Trajectory], count: int) -> list[Trajectory]:
    return list(items)[-count:] if count else []


class _Pool:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.items: deque[Trajectory] = deque()
        self.nbytes = 0

    def add(self, trajectory: Trajectory) -> None:
        self.items.append(trajectory)
        self.nbytes += trajectory.nbytes
        while self.nbytes > self._capacity:
            self.nbytes -= self.items.popleft().nbytes
