"""The probability that a draft is kept, calibrated live from accept flags.

A draft at position j (1-based) is kept if it and all before it are accepted, so its *survival* is
the product of conditional acceptances ``c_i = P(i accepted | i − 1 accepted)``, i ≤ j. Each c_j is
a logistic regression of its own:

    logit c_j = w_j · [1, logit of the drafter's probability, history of the request]

The first two terms are Platt's calibration. Flags are censored: with verify length L and a accepted
drafts, positions up to a were accepted, position a + 1 was rejected if it was verified, later ones
were not observed. As each regression conditions on what lengths are chosen by, a choice of short
lengths does not bias it; it only leaves deep positions unobserved.

Bayesian online update: the posterior of w_j is a Gaussian kept as precision and information of the
flags, Laplace's approximation at the current mean (one Newton step a batch), prior at a map pooled
over positions. The flags' part fades with every row, so a position that is not observed any more
goes back to the pooled map. Greedy requests (accepted: equal to the target's argmax) and sampled
ones (accepted with the target's probability of the draft) have separate maps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaspec.verify.allocation import allocate
from adaspec.verify.calibration import CalibrationMeter, CalibrationReport
from adaspec.verify.step import Flags, Floats, Ints

Array = NDArray[np.float64]

GREEDY, SAMPLED = 0, 1

_FEATURES = 3
_LOGIT_RANGE = 6.0
_LEAST_PROBABILITY = np.float32(1 / (1 + np.exp(_LOGIT_RANGE)))
_MEMORY_ROWS = 2000  # rows (a request's step) after which the weight of a flag has fallen to 1/e
_STEPS_PER_FIT = 8
_USUAL_RATE = 0.02  # per step
_ROWS_PER_FIT = 128  # of more rows a fit uses a random sample
# The prior: without data, trust the drafter's probability, or expect this acceptance without one.
_PRIOR_ACCEPTANCE = 0.7
_POOLED_PRECISION = np.diag([1.0, 4.0, 4.0])
_POSITION_PRECISION = np.diag([8.0, 16.0, 16.0])
# Share of the evidence that outlives a change of the drafter.
_KEPT_EVIDENCE = 0.05
_LEAST_CURVATURE = 0.02  # keeps a Newton step short where the map is sure and wrong


@dataclass
class _Evidence:
    """Flags of one class as Gaussian evidence on the weights of some maps."""

    precision: Array  # [maps, features, features]
    information: Array  # [maps, features]

    @classmethod
    def nothing(cls, maps: int) -> "_Evidence":
        return cls(np.zeros((maps, _FEATURES, _FEATURES)), np.zeros((maps, _FEATURES)))

    def fade(self, factor: float) -> None:
        self.precision *= factor
        self.information *= factor

    def posterior_mean(self, prior_mean: Array, prior_precision: Array) -> Array:
        """Mean ``[maps, features]`` given a prior for each map."""
        precision = self.precision + prior_precision
        information = self.information + prior_mean @ prior_precision
        return np.asarray(np.linalg.solve(precision, information[..., None])[..., 0], np.float64)


@dataclass(frozen=True)
class _Rows:
    """Feedback that waits for the next fit; ``[rows]`` and ``[rows, drafts]``."""

    log_probs: Floats | None
    history: Floats
    sampled: Flags
    accepted: Ints
    lengths: Ints


class SurvivalModel:
    """Calibrated acceptance per block position, on the host.

    Args:
        drafts: drafted tokens of a block, ``block − 1``.
        has_confidence: whether feedback comes with the drafter's log-probabilities.
    """

    def __init__(self, drafts: int, has_confidence: bool) -> None:
        self.drafts = drafts
        self.has_confidence = has_confidence
        base = float(np.log(_PRIOR_ACCEPTANCE / (1 - _PRIOR_ACCEPTANCE)))
        self._base: Array = np.array([0.0, 1.0, 0.0] if has_confidence else [base, 0.0, 0.5])
        self._pooled = [_Evidence.nothing(1) for _ in range(2)]
        self._by_position = [_Evidence.nothing(drafts) for _ in range(2)]
        self._mean = np.broadcast_to(self._base, (2, drafts, _FEATURES)).copy()
        self._pooled_mean = np.broadcast_to(self._base, (2, _FEATURES)).copy()
        self._parameters = self._mean.astype(np.float32)
        self._meters = [CalibrationMeter(drafts) for _ in range(2)]
        self._waiting: list[_Rows] = []
        self._usual = np.full(drafts, np.log(_PRIOR_ACCEPTANCE), np.float32)  # log-probabilities
        self._random = np.random.default_rng(0)
        self.fits = 0

    @property
    def parameters(self) -> Floats:
        """Weights float32 ``[class, drafts, feature]``; others when `fits` has changed."""
        return self._parameters

    def survival(self, log_probs: Floats | None, history: Floats, sampled: Flags) -> Floats:
        """Survival of every draft: float32 ``[batch, drafts]``, not increasing along the block.

        Args:
            log_probs: ``[batch, drafts or fewer]``, or None to use position and history only;
                later drafts are taken to be as sure as usual at their positions.
            history: ``[batch]``, see `adaspec.verify.traffic.Traffic`.
            sampled: ``[batch]``.
        """
        weights = self._parameters[sampled.astype(np.int64)]  # [batch, drafts, feature]
        logit = weights[..., 0] + weights[..., 2] * history[:, None]
        if log_probs is not None:
            logit += weights[..., 1] * _logit(self._complete(log_probs))
        survival: Floats = (1 / (1 + np.exp(-logit))).cumprod(-1, dtype=np.float32)
        return survival

    def observe(
        self,
        log_probs: Floats | None,
        history: Floats,
        sampled: Flags,
        accepted: Ints,
        lengths: Ints,
    ) -> None:
        """Take in the flags of a step; the maps are refitted every few steps.

        Args:
            log_probs: ``[batch, drafts or fewer]``; history, sampled: as they were for the step's
                plan.
            accepted: ``[batch]``, accepted drafts.
            lengths: ``[batch]``, verify lengths, anchors included.
        """
        if not self.has_confidence:
            log_probs = None
        if log_probs is not None:
            usual = self._usual[: log_probs.shape[1]]
            usual += _USUAL_RATE * (log_probs.mean(0) - usual)
            log_probs = self._complete(log_probs)
        self._waiting.append(_Rows(log_probs, history, sampled, accepted, lengths))
        if len(self._waiting) >= _STEPS_PER_FIT or self.fits < _STEPS_PER_FIT:
            self._fit()

    def drafter_changed(self) -> None:
        """Trust what was learned less: other weights are served from now on."""
        self._waiting.clear()
        for evidence in (*self._pooled, *self._by_position):
            evidence.fade(_KEPT_EVIDENCE)

    def report(self, kind: int = GREEDY) -> CalibrationReport:
        """Calibration errors of a class, `GREEDY` or `SAMPLED`."""
        return self._meters[kind].report()

    def _complete(self, log_probs: Floats) -> Floats:
        """``[batch, drafts]``, with what is usual for drafts that were not read."""
        read = log_probs.shape[1]
        if read == self.drafts:
            return log_probs
        unread = np.broadcast_to(self._usual[read:], (len(log_probs), self.drafts - read))
        return np.concatenate([log_probs, unread], axis=1)

    def _features(self, log_probs: Floats | None, history: Floats) -> Array:
        """``[rows, drafts, feature]``."""
        features = np.ones((len(history), self.drafts, _FEATURES))
        features[..., 1] = 0.0 if log_probs is None else _logit(log_probs)
        features[..., 2] = history[:, None]
        return features

    def _conditional(self, features: Array, sampled: Flags) -> Array:
        weights = self._mean[sampled.astype(np.int64)]  # [rows, drafts, feature]
        probability: Array = 1 / (1 + np.exp(-(features * weights).sum(-1)))
        return probability

    def _fit(self) -> None:
        rows = self._waiting
        lengths = np.concatenate([r.lengths for r in rows])
        keep: Ints = np.arange(len(lengths))
        if len(lengths) > _ROWS_PER_FIT:
            keep = self._random.choice(keep, _ROWS_PER_FIT, replace=False)
        lengths = lengths[keep]
        accepted = np.concatenate([r.accepted for r in rows])[keep]
        sampled = np.concatenate([r.sampled for r in rows])[keep]
        history = np.concatenate([r.history for r in rows])[keep]
        stacked = [r.log_probs for r in rows if r.log_probs is not None]
        log_probs = np.concatenate(stacked)[keep] if stacked else None
        self._waiting = []

        features = self._features(log_probs, history)
        position = np.arange(1, self.drafts + 1)
        flags = (position <= accepted[:, None]).astype(np.float64)  # [rows, drafts]
        observed = (position <= accepted[:, None] + 1) & (position < lengths[:, None])
        predicted = self._conditional(features, sampled)
        fading = float(np.exp(-len(lengths) / _MEMORY_ROWS))
        for kind in (GREEDY, SAMPLED):
            mine = sampled == bool(kind)
            if not mine.any():
                continue
            self._meters[kind].fade(fading)
            self._meters[kind].add(predicted[mine], flags[mine], observed[mine])
            self._update(kind, features[mine], flags[mine], observed[mine], fading)
        self._parameters = self._mean.astype(np.float32)
        self.fits += 1

    def _update(self, kind: int, x: Array, flags: Array, observed: Flags, fading: float) -> None:
        """One Newton step of the pooled map, then of every position's map towards it."""
        pooled, by_position = self._pooled[kind], self._by_position[kind]
        by_draft = np.ascontiguousarray(x.transpose(1, 0, 2))  # [drafts, rows, feature]
        for evidence, inputs, weights in (
            (pooled, by_draft.reshape(1, -1, _FEATURES), self._pooled_mean[kind][None]),
            (by_position, by_draft, self._mean[kind]),
        ):
            shape = inputs.shape[:2]  # [maps, flags of each]
            seen, kept = observed.T.reshape(shape), flags.T.reshape(shape)
            probability = 1 / (1 + np.exp(-(inputs @ weights[..., None])[..., 0]))
            curvature = np.maximum(probability * (1 - probability), _LEAST_CURVATURE) * seen
            precision = (inputs * curvature[..., None]).swapaxes(1, 2) @ inputs
            slope = ((kept - probability) * seen)[:, None, :] @ inputs  # [maps, 1, feature]
            evidence.fade(fading)
            evidence.precision += precision
            evidence.information += (precision @ weights[..., None])[..., 0] + slope[:, 0]
        self._pooled_mean[kind] = pooled.posterior_mean(self._base, _POOLED_PRECISION)[0]
        prior = np.broadcast_to(self._pooled_mean[kind], (self.drafts, _FEATURES))
        self._mean[kind] = by_position.posterior_mean(prior, _POSITION_PRECISION)


class DeviceSurvival:
    """The same maps on the device of the drafts, as a handful of tensor operations.

    Args:
        model: whose maps are used; they are copied again after each fit.
        device: of the drafts.
    """

    def __init__(self, model: SurvivalModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._fits = -1
        self._weights = torch.empty(0)
        # What a step has in common with the one before, as long as nothing is learned.
        self._history: Floats | None = None
        self._sampled: Flags | None = None
        self._base = self._confidence = torch.empty(0)  # [batch or 1, drafts]

    def __call__(self, log_probs: Tensor | None, history: Floats, sampled: Flags) -> Tensor:
        """Survival float32 ``[batch, read]`` of drafts with these log-probabilities.

        Args:
            log_probs: float ``[batch, read]``, the first drafts; None to use position and history
                only, for all of them.
            history: ``[batch]`` on the host; sampled: ``[batch]`` on the host. Nobody writes to
                either: the same arrays again save time.
        """
        base, confidence = self._maps(history, sampled)
        if log_probs is not None:
            read = log_probs.shape[1]
            x = log_probs.float().exp().logit(float(_LEAST_PROBABILITY)).nan_to_num(-_LOGIT_RANGE)
            base = torch.addcmul(base[:, :read], confidence[:, :read], x)
        return base.sigmoid().cumprod(-1)

    def lengths(
        self, log_probs: Tensor | None, history: Floats, sampled: Flags, tokens: int
    ) -> Tensor:
        """`allocate` of so many tokens by survival: int32 ``[batch]``; arguments as above."""
        if log_probs is None or not log_probs.is_cuda:
            return allocate(self(log_probs, history, sampled), tokens)
        from adaspec.verify.allocation_kernel import allocate_by_confidence

        base, confidence = self._maps(history, sampled)
        extra = min(max(tokens - len(log_probs), 0), log_probs.numel())
        return allocate_by_confidence(log_probs, base, confidence, float(_LEAST_PROBABILITY), extra)

    def _maps(self, history: Floats, sampled: Flags) -> tuple[Tensor, Tensor]:
        """Log odds of acceptance ``[batch or 1, drafts]``: base, and weight of the confidence."""
        fits = self._model.fits
        if fits != self._fits or history is not self._history or sampled is not self._sampled:
            self._prepare(history, sampled)
        return self._base, self._confidence

    def _prepare(self, history: Floats, sampled: Flags) -> None:
        if self._fits != self._model.fits:
            self._weights = self._upload(self._model.parameters)
            self._fits = self._model.fits
        if sampled.any():
            weights = self._weights[self._upload(sampled.astype(np.int64))]
        else:
            weights = self._weights[GREEDY][None]  # [1, drafts, feature]
        base, self._confidence, past = weights.unbind(-1)
        self._base = torch.addcmul(base, past, self._upload(history)[:, None])
        self._history, self._sampled = history, sampled

    def _upload(self, values: NDArray[np.float32] | Ints) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _logit(log_probs: Floats) -> Floats:
    """``log p − log(1 − p)``, clipped; NaN counts as no confidence at all."""
    p = np.exp(log_probs)
    # fmax and fmin take the other argument of a NaN.
    p = np.fmin(np.fmax(p, _LEAST_PROBABILITY), 1 - _LEAST_PROBABILITY)
    x: Floats = np.log(p / (1 - p))
    return x
