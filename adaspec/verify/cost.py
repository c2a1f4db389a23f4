"""Step time over (batch, verified tokens, context), learned from the steps themselves.

A Gaussian process on a grid, filtered as samples come. With u and v in units of 65,536 tokens,

    time = origin · (exp(f(batch, tokens)) + k · u + k_v · v)

f is interpolated between knots (one set for plain steps, one for drafted ones), u is the context of
all requests, k its price (for plain and for drafted steps) and v = tokens · u / batch the positions
that verified tokens attend to. In this form a longer context makes extra tokens relatively cheaper,
as it is. A sample moves what it is evidence for: its neighbours much, the whole table as far as all
of it would be slower (`CostGrid.prior`). Every sample lets a small share of the prior's uncertainty
back in, so that the table follows a changing machine.

Robustness: samples are taken in by eights; what strays from the median of their surprises by more
than three standard deviations counts as three (a stall moves the table by no more than noise does),
and when the median itself is that far off, the whole table has become uncertain in its level and
follows at once.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaspec.verify.grid import LEVEL_STD, CostGrid

Array = NDArray[np.float64]

_SAMPLES_PER_UPDATE, _MOST_WAITING = 8, 32
_CLIP = 3.0  # standard deviations
# With every sample so much of the prior's covariance comes back, and more of its level's: a machine
# becomes slower as a whole sooner than it changes its ways.
_FORGETTING = 1e-5
_LEVEL_DRIFT = 10
_FIRST_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.1, 0.02, 0.5  # of log time
_NOISE_RATE = 0.05
_PROBE_NOISE = 0.05
# What a probe may have wrong about all plain steps, and more about those of one batch size: it runs
# them alone, with nothing that SGLang does between steps. Live steps tell; a drafted one says
# nothing of it.
_PROBE_BIAS, _PROBE_BIAS_ALONG_BATCH = 0.25, 0.15
_STD_PER_MAD = 1.48  # of a Gaussian
_CONTEXT_UNIT = 65536.0  # tokens
# Prior of what so much context adds, relative to the first sample's time.
_CONTEXT_PRIOR_STD = (0.5, 0.5, 0.1)
_PLAIN_CONTEXT, _DRAFTED_CONTEXT, _ATTENDED = 0, 1, 2
_LONGEST_RATIO = 1e4  # between two step times that are believed


@dataclass(frozen=True)
class CostSample:
    """One measured step.

    Attributes:
        batch: requests.
        tokens: verified tokens, anchors, padding and drafts read included (`VerifyShapes.work`).
        context_tokens: committed tokens of all requests.
        drafted: whether there was a draft pass.
        seconds: duration.
    """

    batch: int
    tokens: float
    context_tokens: int
    drafted: bool
    seconds: float


@dataclass(frozen=True)
class CostTable:
    """The model at a glance, for metrics.

    Attributes:
        batches: ``[b]`` and widths: ``[w]``, the knots; tokens per request.
        plain: seconds ``[b]``, without context; plain_error: relative standard deviation.
        drafted: seconds ``[b, w]``; drafted_error.
        samples: of plain and of drafted steps; 0 means that the numbers are the prior's.
        noise: relative scatter of a step's time.
    """

    batches: list[int]
    widths: list[int]
    plain: Array
    plain_error: Array
    drafted: Array
    drafted_error: Array
    samples: tuple[int, int]
    noise: float


@dataclass(frozen=True)
class CostCurve:
    """Expected duration of drafted steps of one batch size.

    Attributes:
        base: ``[.., choices]``, seconds without context.
        per_context: ``[.., choices]``, seconds per context token of the whole batch.
    """

    base: Array
    per_context: Array

    def seconds(self, context_tokens: int) -> Array:
        """``[.., choices]``, not falling along rising tokens, up to the whole block."""
        return self.base + self.per_context * context_tokens


class CostModel:
    """Learns and predicts step times.

    Args:
        block_size: tokens of a draft block, the anchor included.
        max_batch: most requests that run at once.
    """

    def __init__(self, block_size: int, max_batch: int) -> None:
        self.grid = CostGrid(block_size, max_batch)
        size = self.grid.size
        mean, covariance = self.grid.prior()
        self._mean = np.concatenate([mean, np.zeros(3)])
        self._prior = np.zeros((size + 3, size + 3))
        self._prior[:size, :size] = covariance
        self._prior[range(size, size + 3), range(size, size + 3)] = np.square(_CONTEXT_PRIOR_STD)
        self._covariance = self._prior.copy()
        self._drift = self._prior.copy()
        self._drift[:size, :size] += (_LEVEL_DRIFT - 1) * LEVEL_STD**2
        self._origin = 0.0
        self._noise = _FIRST_NOISE
        self._waiting: deque[CostSample] = deque(maxlen=_MOST_WAITING)
        self._samples = [0, 0]
        self.updates = 0
        self._plain: Array = np.zeros(0)  # [batches], log seconds over the origin
        self._drafted: Array = np.zeros((0, 0))  # [batches, widths], see `_refresh`
        self._refresh()

    def samples(self, drafted: bool) -> int:
        """Samples of drafted or of plain steps taken in; without any, predictions are guesses."""
        return self._samples[drafted]

    def observe(self, sample: CostSample) -> None:
        """Note a measured step for `learn`; durations that are not positive or finite are not."""
        if 0 < sample.seconds < np.inf:
            self._waiting.append(sample)

    def learn(self) -> None:
        """Take in what was noted, by eights; fewer wait for more."""
        while len(self._waiting) >= _SAMPLES_PER_UPDATE:
            self._take_in([self._waiting.popleft() for _ in range(_SAMPLES_PER_UPDATE)])

    def seed(self, samples: Iterable[CostSample]) -> None:
        """Take in the measurements of a start-up probe, at once; repeats count by their median."""
        repeats: dict[tuple[int, float, int, bool], list[float]] = {}
        for s in samples:
            if 0 < s.seconds < np.inf:
                point = (s.batch, s.tokens, s.context_tokens, s.drafted)
                repeats.setdefault(point, []).append(s.seconds)
                self._samples[s.drafted] += 1
        medians = [CostSample(*point, float(np.median(t))) for point, t in repeats.items()]
        if not medians:
            return
        design, surprise = self._surprise(medians)
        noise = _PROBE_NOISE / np.sqrt([len(t) for t in repeats.values()])
        self._correct(design, surprise, noise)
        plain = slice(0, len(self.grid.batches))
        self._covariance[plain, plain] += (
            _PROBE_BIAS**2 + _PROBE_BIAS_ALONG_BATCH**2 * self.grid.batch_likeness
        )

    def curve(self, batch: int, tokens: Array) -> CostCurve:
        """Expected duration of drafted steps by ``tokens`` (see `CostSample`) ``[.., choices]``.

        It holds until `updates` changes.
        """
        lower, upper, up = self.grid.row(batch)
        knots = (1 - up) * self._drafted[lower] + up * self._drafted[upper]
        log_time = np.interp(np.log2(tokens / batch), self.grid.log_widths, knots)
        prices = self._origin / _CONTEXT_UNIT * self._mean[self.grid.size :]
        per_context = prices[_DRAFTED_CONTEXT] + prices[_ATTENDED] / batch * tokens
        return CostCurve(self._origin * np.exp(log_time), per_context)

    def plain_seconds(self, batch: int, context_tokens: int) -> float:
        """Expected duration of a plain decoding step."""
        lower, upper, up = self.grid.row(batch)
        log_time = (1 - up) * self._plain[lower] + up * self._plain[upper]
        price = self._mean[self.grid.size + _PLAIN_CONTEXT] + self._mean[self.grid.size + _ATTENDED]
        time = math.exp(log_time) + float(price) * context_tokens / _CONTEXT_UNIT
        return self._origin * time

    def doubt(self, batch: int, tokens: Array, drafted: bool) -> Array:
        """Standard deviation ``[choices]`` of the predictions' logarithms: how little is known.

        The scatter of single steps is not part of it.
        """
        places = [self.grid.place(batch, float(t), drafted) for t in tokens]
        knots, weights = np.array([p.knots for p in places]), np.array([p.weights for p in places])
        among = self._covariance[knots[:, :, None], knots[:, None, :]]  # [choices, corners, ..]
        variance: Array = np.einsum("ci,cij,cj->c", weights, among, weights)
        return np.sqrt(variance)

    def table(self) -> CostTable:
        """The current table."""
        batches = len(self.grid.batches)
        error = np.sqrt(np.diag(self._covariance))[: self.grid.size]
        return CostTable(
            list(self.grid.batches),
            list(self.grid.widths),
            self._origin * np.exp(self._plain),
            error[:batches],
            self._origin * np.exp(self._drafted),
            error[batches:].reshape(self._drafted.shape),
            (self._samples[False], self._samples[True]),
            self._noise,
        )

    def _take_in(self, samples: list[CostSample]) -> None:
        for sample in samples:
            self._samples[sample.drafted] += 1
        design, surprise = self._surprise(samples)
        self._covariance += _FORGETTING * len(samples) * (self._drift - self._covariance)
        spread = self._spread(design)
        median = float(np.median(surprise))
        if abs(np.median(surprise / spread)) > _CLIP:
            size = self.grid.size
            self._covariance[:size, :size] += median**2
            spread = self._spread(design)
        else:
            scatter = _STD_PER_MAD * float(np.median(np.abs(surprise - median)))
            noise = self._noise + _NOISE_RATE * (scatter - self._noise)
            self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)
        reach = _CLIP * spread
        surprise = median + np.clip(surprise - median, -reach, reach)
        self._correct(design, surprise, np.full(len(samples), self._noise))

    def _surprise(self, samples: list[CostSample]) -> tuple[Array, Array]:
        """Design ``[samples, state]``, and log of the times over what was expected."""
        times = np.array([s.seconds for s in samples])
        if self._origin == 0.0:
            self._origin = float(np.median(times))
        ratios = np.clip(times / self._origin, 1 / _LONGEST_RATIO, _LONGEST_RATIO)
        design, predicted = self._linearise(samples)
        return design, np.log(ratios) - predicted

    def _spread(self, design: Array) -> Array:
        """Standard deviation ``[samples]`` of what samples of this design will show."""
        variance: Array = ((design @ self._covariance) * design).sum(-1)
        return np.sqrt(variance + self._noise**2)

    def _correct(self, design: Array, surprise: Array, noise: Array) -> None:
        """Step of the extended Kalman filter; noise: ``[samples]``, standard deviations."""
        across = self._covariance @ design.T  # [state, samples]
        gain = np.linalg.solve(design @ across + np.diag(noise**2), across.T).T
        self._mean += gain @ surprise
        self._covariance -= gain @ across.T
        self._mean[self.grid.size :] = np.maximum(self._mean[self.grid.size :], 0.0)
        self._refresh()
        self.updates += 1

    def _linearise(self, samples: list[CostSample]) -> tuple[Array, Array]:
        """Derivative of log time by the state ``[samples, state]``, and log time ``[samples]``."""
        size = self.grid.size
        design = np.zeros((len(samples), size + 3))
        predicted = np.zeros(len(samples))
        for i, sample in enumerate(samples):
            place = self.grid.place(sample.batch, sample.tokens, sample.drafted)
            f = sum(w * self._mean[k] for k, w in zip(place.knots, place.weights, strict=True))
            u = sample.context_tokens / _CONTEXT_UNIT
            v = u * sample.tokens / sample.batch
            price = size + (_DRAFTED_CONTEXT if sample.drafted else _PLAIN_CONTEXT)
            base = np.exp(f)
            time = base + self._mean[price] * u + self._mean[size + _ATTENDED] * v
            for k, w in zip(place.knots, place.weights, strict=True):
                design[i, k] += w * base / time
            design[i, price] = u / time
            design[i, size + _ATTENDED] = v / time
            predicted[i] = np.log(time)
        return design, predicted

    def _refresh(self) -> None:
        """Knots to predict from: drafted ones made to rise with the tokens.

        The mean of the smallest rising table above and the largest below is rising too, and is
        the table itself where that rises already. The whole block is left as it is: its chains
        are all equally long, so nothing is shared out, and it can be faster than most of it.
        """
        batches = len(self.grid.batches)
        self._plain = self._mean[:batches]
        drafted = self._mean[batches : self.grid.size].reshape(batches, -1)
        parts = drafted[:, :-1]
        above = np.maximum.accumulate(parts, axis=1)
        below = np.minimum.accumulate(parts[:, ::-1], axis=1)[:, ::-1]
        self._drafted = np.concatenate([(above + below) / 2, drafted[:, -1:]], axis=1)
