"""Kinds of drift, made of recorded traffic of two domains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from online.trajectory import Trajectory

Traffic = Sequence[Trajectory]


@dataclass(frozen=True)
class Request:
    """One request of a scenario.

    Attributes:
        phase: stretch of the scenario between two changes.
    """

    phase: str
    trajectory: Trajectory


def stationary(known: Traffic, new: Traffic) -> list[Request]:
    """The known domain only."""
    return [Request("known", t) for t in known]


def abrupt(known: Traffic, new: Traffic) -> list[Request]:
    """A third known, then the new domain at once."""
    first = known[: len(new) // 2]
    return [Request("known", t) for t in first] + [Request("new", t) for t in new]


def gradual(known: Traffic, new: Traffic) -> list[Request]:
    """The share of the new domain rises evenly from nothing to all."""
    length = len(new)
    # Evenly spread: the k-th new request comes where the integral of the share reaches k + 1/2.
    places = {int(length * np.sqrt((2 * k + 1) / length)) for k in range(length // 2)}
    sources = iter(known), iter(new)
    return [Request("mixed", next(sources[place in places])) for place in range(length)] + [
        Request("new", t) for t in new[length // 2 :]
    ]


def recurring(known: Traffic, new: Traffic) -> list[Request]:
    """Known, new, known, new: quarters."""
    quarter = min(len(known), len(new)) // 2
    pieces = {
        "known": known[:quarter],
        "new": new[:quarter],
        "known again": known[quarter : 2 * quarter],
        "new again": new[quarter : 2 * quarter],
    }
    return [Request(phase, t) for phase, piece in pieces.items() for t in piece]


SCENARIOS: Mapping[str, Callable[[Traffic, Traffic], list[Request]]] = {
    "stationary": stationary,
    "abrupt": abrupt,
    "gradual": gradual,
    "recurring": recurring,
}


def scenario(name: str, known: Traffic, new: Traffic, seed: int) -> list[Request]:
    """A scenario with the requests of each domain in an order of the seed's."""
    rng = np.random.default_rng(seed)
    shuffled = [[traffic[i] for i in rng.permutation(len(traffic))] for traffic in (known, new)]
    return SCENARIOS[name](*shuffled)
