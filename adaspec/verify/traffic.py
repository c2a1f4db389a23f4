"""What the requests in flight were like lately: the host's stand-in for the coming drafts.

The budget of a step is chosen before its drafts exist. Their survival is taken to be distributed as
that of the last blocks of the same requests; a new request starts with blocks of the others.
"""

import numpy as np

from adaspec.verify.step import Floats, Ints

_DEPTH = 16  # blocks remembered per request
_POPULATION = 512  # blocks of all requests
# A new request starts with first blocks of earlier ones: so many of each, so many in all.
_FIRST_BLOCKS, _NEWCOMERS = 4, 64
_REQUESTS_COMPARED = 32
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
        prior: Floats = np.full(drafts, _PRIOR_ACCEPTANCE, np.float32).cumprod(dtype=np.float32)
        self._drafts = drafts
        self._depth = depth
        self._rows = np.tile(prior, (slots, depth, 1))  # [slots, depth, drafts]
        self._written = np.zeros(slots, np.int64)
        self._accepted = np.zeros(slots)
        self._observed = np.zeros(slots)
        self._population = np.tile(prior, (_POPULATION, 1))  # [population, drafts]
        self._population_written = 0
        self._newcomers = self._population[:_NEWCOMERS].copy()  # [newcomers, drafts]
        self._newcomers_written = 0
        self._mean = np.array([_PRIOR_ACCEPTANCE, 1.0])  # accepted and observed flags, fading
        self._slot: dict[str, int] = {}
        self._names = [""] * slots
        self._used = np.zeros(slots, np.int64)  # when a slot's request was last admitted
        self._admissions = 0
        self._random = np.random.default_rng(0)
        self._batch: tuple[str, ...] = ()
        self._batch_slots: Ints = np.zeros(0, np.int64)

    def admit(self, requests: tuple[str, ...]) -> Ints:
        """Slots ``[batch]`` of the batch that is planned; new requests get one."""
        if requests != self._batch:
            self._admissions += 1
            known = [self._slot.get(request, -1) for request in requests]
            slots = np.array(known, dtype=np.int64)
            self._used[slots[slots >= 0]] = self._admissions
            new = np.flatnonzero(slots < 0)
            if len(new):
                slots[new] = self._new_slots([requests[i] for i in new])
            self._batch, self._batch_slots = requests, slots
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
        first = rows[self._written[mine] < _FIRST_BLOCKS]
        self._rows[mine, self._written[mine] % self._depth] = rows
        self._written[mine] += 1
        self._population_written = _append(self._population, self._population_written, rows)
        self._newcomers_written = _append(self._newcomers, self._newcomers_written, first)

    def recent(self, slots: Ints, blocks: int, difference: float = 1.0) -> Floats:
        """Survival rows to expect of these requests' next drafts: ``[samples, batch, drafts]``.

        The newest rows of a request; while it has few, with those it started with in the
        proportion that `difference` of the requests calls for.

        Args:
            blocks: samples wanted; there are no more than are remembered.
        """
        depth = self._depth
        blocks = min(depth, blocks)
        written = self._written[slots]  # [batch]
        own = np.minimum(written, depth)
        # Variance within requests over that between them, in rows.
        prior = depth * (1 - difference) / max(difference, 1e-3)
        count = np.where(own < depth, np.round(blocks * own / (own + prior + 1e-9)), blocks)
        sample = np.arange(blocks)[:, None]
        newest = (written - 1 - sample % np.maximum(own, 1)) % depth  # [samples, batch]
        first = own + sample % np.maximum(depth - own, 1)
        rows: Floats = self._rows[slots, np.where(sample < count, newest, first % depth)]
        return rows

    def population(self, batch: int, blocks: int) -> Floats:
        """The newest rows of all requests as batches of this size: ``[samples, batch, drafts]``."""
        rows = min(batch * blocks, _POPULATION, max(self._population_written, 1))
        samples = max(1, rows // batch)
        places = self._population_written - 1 - np.arange(samples * batch) % rows
        newest: Floats = self._population[places % _POPULATION]
        return newest.reshape(samples, batch, self._drafts)

    def difference(self) -> float:
        """How far requests differ in what their blocks accept, 0 to 1.

        The share of request from request in the variance of a mean over the blocks remembered of
        one: the weight of that mean against the mean of all in James and Stein's estimator.
        """
        known = np.flatnonzero(self._written >= self._depth)
        known = known[np.argsort(self._used[known], kind="stable")[-_REQUESTS_COMPARED:]]
        if len(known) < 2 or self._depth < 2:
            return 1.0
        accepted = self._rows[known].sum(-1, dtype=np.float64)  # [requests, depth]
        of_means = accepted.mean(1).var(ddof=1)
        by_chance = accepted.var(1, ddof=1).mean() / self._depth
        return float(max(0.0, 1 - by_chance / of_means)) if of_means > 0 else 0.0

    def _new_slots(self, requests: list[str]) -> Ints:
        """The slots of the requests that were away longest, now of these."""
        slots = np.argsort(self._used, kind="stable")[: len(requests)]
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._slot.pop(self._names[slot], None)
            self._slot[request], self._names[slot] = slot, request
        self._used[slots] = self._admissions
        rows = min(max(self._newcomers_written, 1), _NEWCOMERS)
        first = self._random.integers(rows, size=(len(slots), self._depth))
        self._rows[slots] = self._newcomers[first]
        self._written[slots] = 0
        self._accepted[slots] = self._observed[slots] = 0.0
        return slots


def _append(ring: Floats, written: int, rows: Floats) -> int:
    """Write rows over the oldest ones; the new count of rows ever written."""
    ring[(written + np.arange(len(rows))) % len(ring)] = rows
    return written + len(rows)
