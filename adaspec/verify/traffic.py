"""What the requests in flight were like lately: the host's stand-in for the coming drafts.

The budget of a step is chosen before its drafts exist. Their survival is taken to be distributed as
that of the last blocks of the same requests; a new request starts with blocks of the others.
"""

import numpy as np

from adaspec.verify.step import Floats, Ints

_DEPTH = 8  # blocks remembered per request
_BLOCKS_PER_ESTIMATE = 64  # of all requests; few requests: more blocks of each
_POPULATION = 256
_PRIOR_ACCEPTANCE = 0.7
_HISTORY_DECAY = 0.9  # per step of the request
_HISTORY_PRIOR = 4.0  # flags
_HISTORY_RANGE = 3.0
_POPULATION_DECAY = 0.999  # per request's step


class Traffic:
    """Recent survival rows and the acceptance history of every request.

    Args:
        drafts: drafted tokens of a block.
        max_batch: most requests that run at once; twice as many are remembered.
        depth: survival rows kept per request; 1 if a row says all there is to know.
    """

    def __init__(self, drafts: int, max_batch: int, depth: int = _DEPTH) -> None:
        slots = 2 * max_batch
        prior = np.cumprod(np.full(drafts, _PRIOR_ACCEPTANCE, np.float32))
        self._drafts = drafts
        self._depth = depth
        self._rows = np.tile(prior, (slots, depth, 1))  # [slots, depth, drafts]
        self._written = np.zeros(slots, np.int64)
        self._accepted = np.zeros(slots)
        self._observed = np.zeros(slots)
        self._population = np.tile(prior, (_POPULATION, 1))  # [population, drafts]
        self._population_written = 0
        self._mean = np.array([_PRIOR_ACCEPTANCE, 1.0])  # accepted and observed flags, fading
        self._slot: dict[str, int] = {}  # least recently planned first
        self._free = list(range(slots))
        self._random = np.random.default_rng(0)
        self._batch: tuple[str, ...] = ()
        self._batch_slots: Ints = np.zeros(0, np.int64)

    def admit(self, requests: tuple[str, ...]) -> Ints:
        """Slots ``[batch]`` of the batch that is planned; new requests get one."""
        if requests != self._batch:
            self._batch_slots = np.array([self._touch(r) for r in requests], dtype=np.int64)
            self._batch = requests
        return self._batch_slots

    def find(self, requests: tuple[str, ...]) -> Ints:
        """Slots ``[batch]`` of a batch planned before; −1 where a request was forgotten."""
        if requests == self._batch:
            return self._batch_slots
        return np.array([self._slot.get(r, -1) for r in requests], dtype=np.int64)

    def history(self, slots: Ints) -> Floats:
        """How well drafts of a request were accepted so far: float32 ``[batch]``.

        Log-odds of acceptance against those of all requests, shrunk to 0 and fading.
        """
        mean = self._mean[0] / self._mean[1]
        accepted = self._accepted[slots] + _HISTORY_PRIOR * mean
        rejected = self._observed[slots] + _HISTORY_PRIOR - accepted
        log_odds = np.log(accepted / np.maximum(rejected, 1e-3)) - np.log(mean / (1 - mean))
        clipped = np.clip(log_odds, -_HISTORY_RANGE, _HISTORY_RANGE)
        return np.where(slots < 0, 0.0, clipped).astype(np.float32)

    def record_flags(self, slots: Ints, accepted: Ints, lengths: Ints) -> None:
        """Count accept flags: accepted drafts and verify lengths, ``[batch]``."""
        observed = np.minimum(accepted + 1, lengths - 1)
        known = slots >= 0
        mine = slots[known]
        self._accepted[mine] = _HISTORY_DECAY * self._accepted[mine] + accepted[known]
        self._observed[mine] = _HISTORY_DECAY * self._observed[mine] + observed[known]
        self._mean *= _POPULATION_DECAY ** len(slots)
        # One flag of either kind a row keeps the log-odds finite.
        self._mean += (accepted.sum() + 0.01 * len(slots), observed.sum() + 0.02 * len(slots))

    def record_survival(self, slots: Ints, survival: Floats) -> None:
        """Remember the survival ``[batch, drafts]`` of the requests' newest drafts."""
        known = slots >= 0
        mine, rows = slots[known], survival[known]
        self._rows[mine, self._written[mine] % self._depth] = rows
        self._written[mine] += 1
        places = (self._population_written + np.arange(len(rows))) % _POPULATION
        self._population[places] = rows
        self._population_written += len(rows)

    def recent(self, slots: Ints) -> Floats:
        """Survival rows ``[samples, batch, drafts]`` to expect of the next drafts."""
        samples = min(self._depth, max(1, _BLOCKS_PER_ESTIMATE // len(slots)))
        newest = self._written[slots] - 1 - np.arange(samples)[:, None]  # [samples, batch]
        rows: Floats = self._rows[slots, newest % self._depth]
        return rows

    def _touch(self, request: str) -> int:
        slot = self._slot.pop(request, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._forget_oldest()
            newest = min(max(self._population_written, 1), _POPULATION)
            self._rows[slot] = self._population[self._random.integers(newest, size=self._depth)]
            self._accepted[slot] = self._observed[slot] = 0.0
        self._slot[request] = slot
        return slot

    def _forget_oldest(self) -> int:
        return self._slot.pop(next(iter(self._slot)))


def expected_commits(survival: Floats) -> Floats:
    """Expected committed tokens of a step by the number of drafts verified.

    The drafts are shared out as `adaspec.verify.allocation.allocate` does.

    Args:
        survival: ``[samples, batch, drafts]``, equally likely.

    Returns:
        ``[batch · drafts + 1]``; entry k is ``batch + mean over samples of the k largest``.
    """
    samples, batch, drafts = survival.shape
    ordered = survival.reshape(samples, batch * drafts)
    if batch > 1:  # the rows of one request are in order
        ordered = np.sort(ordered, axis=-1)[:, ::-1]
    gains = ordered.mean(0) if samples > 1 else ordered[0]
    commits = np.empty(batch * drafts + 1, np.float32)
    commits[0] = batch
    np.cumsum(gains, out=commits[1:])
    commits[1:] += batch
    return commits


def expected_uniform_commits(survival: Floats) -> Floats:
    """The same for uniform steps: ``[drafts + 1]``, by drafts verified of every request."""
    samples, batch, drafts = survival.shape
    commits = np.empty(drafts + 1, np.float32)
    commits[0] = batch
    np.cumsum(survival.sum((0, 1)) / samples, out=commits[1:])
    commits[1:] += batch
    return commits
