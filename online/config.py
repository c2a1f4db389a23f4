"""The learner's settings: one typed TOML file, every key with a default, unknown keys refused."""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adaspec.plugins import check_factory
from adaspec.settings import read_settings
from adaspec.versions import Mode

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ProcessSection(_Section, frozen=True, kw_only=True):
    """How the learner shares the machine.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` is the first GPU, or the CPU without one.
        gpu_bytes: cap of the learner's tensors on a GPU, which it may share with the server.
        threads: CPU threads for tensor work.
        nice: added to the process priority's niceness; 10 yields to any normal process.
        cpus: CPUs the learner may run on; empty for all.
        seed: of the sampling of trajectories and anchors.
    """

    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    gpu_bytes: Count = 6 << 30
    threads: Count = 1
    nice: Annotated[int, Meta(ge=0, le=19)] = 10
    cpus: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    seed: int = 0


class IntakeSection(_Section, frozen=True, kw_only=True):
    """What is kept while requests are being put together.

    Attributes:
        open_bytes: cap of unfinished requests; the one idle for longest gives way.
        prefix_bytes: cap of the store that supplies the taps of cached prefixes.
        top_k: logits that are kept of a teacher row that came as a hidden state, with their exact
            logsumexp, so that the target's lm_head is applied to it once; 0 keeps the state and
            applies it in every step that trains on the row.
    """

    open_bytes: Count = 512 << 20
    prefix_bytes: Count = 512 << 20
    top_k: Annotated[int, Meta(ge=0)] = 64


class ReplaySection(_Section, frozen=True, kw_only=True):
    """What is learned from.

    Attributes:
        bytes: cap of finished trajectories in memory; the oldest give way.
        half_life: a trajectory is drawn half as often as one this many trajectories younger.
        held_back: share of requests kept for the gate and never trained on.
        fresh: the newest of the other requests, which wait: candidates are judged by them, and they
            are trained on when so many have come since. So the gate sees the traffic of the moment,
            however few requests there are.
    """

    bytes: Count = 1 << 30
    half_life: Positive = 256.0
    held_back: Share = 0.15
    fresh: Annotated[int, Meta(ge=0)] = 16


class ObjectiveSection(_Section, frozen=True, kw_only=True):
    """What the drafter is trained for; see `online.objectives`.

    Attributes:
        kind: ``adaflash`` (arXiv 2607.19223): hard labels and clipped reverse KL; ``osd``
            (arXiv 2310.07177): a divergence at wrong positions; ``survival``: the expected number
            of accepted drafts; ``custom``: an objective of your own.
        factory: of custom, the code that makes the objective, as ``package.module:name``; it is run
            in the learner.
        alpha: of adaflash, weight of the hard cross-entropy; the rest is reverse KL.
        clip: of adaflash, cap of one token's reverse KL in nats.
        clip_order: of adaflash, ``token`` clips before the mean over tokens; ``mean`` clips what is
            already divided by the batch's weight, as AdaFlash does (with a clip of 0.01).
        divergence: of osd, ``forward-kl``, ``reverse-kl``, ``jsd``, or ``osd-jsd``, which is what
            OSD's code calls JSD: 0.9 forward and 0.1 reverse KL.
        wrong_only: of osd, learn only where the drafter's best token is not the target's.
        smoothing: of survival, acceptance is taken for this much of the way nearer to 1 when
            positions are weighted; 0 is the exact gradient.
        negatives: weight of ``-log(1 - p)`` of drafts that were rejected; 0 leaves them out.
        decay: block position k counts ``exp(-(k - 1) / decay)``, except in survival.
        chunk_rows: rows whose logits exist at a time.
    """

    kind: Literal["adaflash", "osd", "survival", "custom"] = "adaflash"
    factory: str | None = None
    alpha: Share = 0.8
    clip: Positive = 10.0
    clip_order: Literal["token", "mean"] = "token"
    divergence: Literal["forward-kl", "reverse-kl", "jsd", "osd-jsd"] = "forward-kl"
    wrong_only: bool = True
    smoothing: Share = 0.2
    negatives: NonNegative = 0.0
    decay: Positive = 7.0
    chunk_rows: Count = 1024

    def __post_init__(self) -> None:
        """Refuse code that nothing would run; msgspec reports the ``ValueError``."""
        check_factory(
            self.factory, key="objective.factory", chooser="objective.kind", chosen=self.kind
        )

    @property
    def position_decay(self) -> float:
        """``decay``, or infinity where the objective weights positions itself."""
        return math.inf if self.kind == "survival" else self.decay


class BatchSection(_Section, frozen=True, kw_only=True):
    """What one optimiser step sees.

    Attributes:
        trajectories: drawn for each step.
        blocks: draft blocks on each trajectory, at most.
        real_share: share of them that the server really drafted; the others have random anchors.
        real_labels: ``verified``: of a really drafted block, only positions up to the first
            rejection count; ``trajectory``: later ones are labelled from the continuation, too.
        max_context: trajectories are cut to this many tokens.
        passes: times each trajectory is drawn on average; when traffic stops, so does training.
        conditional_drop: of a block's positions, k counts with the chance of at least
            ``conditional_drop ** (k - 1)`` and only if the one before does (PARD, arXiv 2504.18583,
            with 0.7); the rest costs no logits. 1 drops none.
        least_kept: the chance does not fall below this (0.2 in PARD).
    """

    trajectories: Count = 8
    blocks: Count = 32
    real_share: Share = 0.5
    real_labels: Literal["verified", "trajectory"] = "verified"
    max_context: Count = 4096
    passes: Positive = 4.0
    conditional_drop: Share = 1.0
    least_kept: Share = 0.2


class OptimiserSection(_Section, frozen=True, kw_only=True):
    """Online gradient descent at a constant rate after warm-up.

    Attributes:
        rule: ``adamw``, or ``sgd`` without momentum.
        hint: of the optimistic rule: ``last``, the next gradient will be like the last, or
            ``average``, like a fading mean; ``none`` is plain descent.
        learning_rate: AdaFlash's online rate by default.
        head_learning_rate: of the length head, if the drafter has one; AdaFlash's as well.
        clip_norm: cap of the gradient's norm.
        warmup_steps: linear.
    """

    rule: Literal["adamw", "sgd"] = "adamw"
    hint: Literal["none", "last", "average"] = "none"
    learning_rate: Positive = 3e-4
    head_learning_rate: Positive = 2e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: NonNegative = 0.0
    clip_norm: Positive = 1.0
    warmup_steps: Annotated[int, Meta(ge=0)] = 10


class ScopeSection(_Section, frozen=True, kw_only=True):
    """Which of the weights that the mode allows are trained.

    Attributes:
        weights: ``all``; ``last-layers``, with the final norm; or ``low-rank``, a delta of this
            rank for every matrix. The length head always is.
        layers: how many last layers.
        rank: of a delta.
    """

    weights: Literal["all", "last-layers", "low-rank"] = "all"
    layers: Count = 1
    rank: Count = 16


class EnsembleSection(_Section, frozen=True, kw_only=True):
    """Several learning rates at once, and the frozen base (OnlineSPEC, arXiv 2603.12617).

    Attributes:
        rates: one expert for each, times ``optimiser.learning_rate``; empty: one, and no ensemble.
            Every expert holds its own weights and moments, and costs a training step of its own.
        eagerness: rate of the exponential weights, for a loss of target passes per committed token
            on each new trajectory.
        share: of the trust that is spread evenly with each trajectory, so that experts can return.
        play: ``average`` of the weights by trust, or the ``leader``'s.
        memories: drafters of earlier traffic that are kept as experts, one for each drift; use
            ``leader`` with them, since an average of weights far apart is no drafter.
    """

    rates: tuple[Positive, ...] = ()
    eagerness: Positive = 2.0
    share: Share = 0.02
    play: Literal["average", "leader"] = "average"
    memories: Annotated[int, Meta(ge=0, le=16)] = 0


class PaceSection(_Section, frozen=True, kw_only=True):
    """When to learn.

    Attributes:
        most: share of the time that may be spent learning, over some minutes.
        patience: candidates in a row that change nothing before learning rests; 0: it never does.
        drift: how far per-request acceptance must stray from what it was when learning came to
            rest before it resumes, in standard deviations summed over requests (CUSUM).
        retry: requests after which it resumes in any case.
    """

    most: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    patience: Annotated[int, Meta(ge=0)] = 8
    drift: Positive = 16.0
    retry: Count = 2000


class GateSection(_Section, frozen=True, kw_only=True):
    """When a candidate is judged, and what it must show.

    Attributes:
        every_steps: optimiser steps between two candidates.
        min_requests: requests to judge by without which nothing is published.
        max_requests: the most that are replayed: the fresh ones and the newest held back.
        passes: target passes simulated on each.
        confidence: of the bootstrap intervals.
        tolerance: the lower end of the candidate's relative gain may be this far below zero; its
            estimate must be above.
        keep_versions: old versions left on disk.
    """

    every_steps: Count = 20
    min_requests: Count = 8
    max_requests: Count = 64
    passes: Count = 16
    confidence: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.9
    tolerance: NonNegative = 0.02
    keep_versions: Count = 4


class LearnConfig(_Section, frozen=True, kw_only=True):
    """Everything `adaspec learn` reads from its file.

    Attributes:
        mode: ``frozen-kv`` trains nothing that context K/V are made of, so that a server's draft KV
            cache outlives a swap; ``full`` trains everything.
        status_seconds: interval of the status stream.
        save_seconds: interval of state files.
    """

    mode: Mode = "frozen-kv"
    status_seconds: Positive = 1.0
    save_seconds: Positive = 60.0
    process: ProcessSection = ProcessSection()
    intake: IntakeSection = IntakeSection()
    replay: ReplaySection = ReplaySection()
    objective: ObjectiveSection = ObjectiveSection()
    batch: BatchSection = BatchSection()
    optimiser: OptimiserSection = OptimiserSection()
    scope: ScopeSection = ScopeSection()
    ensemble: EnsembleSection = EnsembleSection()
    pace: PaceSection = PaceSection()
    gate: GateSection = GateSection()


def load_learn_config(path: Path) -> LearnConfig:
    """Read and check a configuration file.

    Raises:
        AdaSpecError: if the file is missing, is not TOML, or holds an unknown key or a bad value.
    """
    return read_settings(path, LearnConfig, "the learner's configuration", "check the path")
