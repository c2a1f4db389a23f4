"""Several learning rates at once, the frozen base among them (OnlineSPEC, arXiv 2603.12617).

The best rate depends on drift that nobody knows beforehand. Every expert trains on the same batches
at a rate of its own; trust is earned by drafting trajectories that none has seen, before any trains
on them. One drafter is served: the average of the weights by trust, or the most trusted.

Drafters of earlier traffic can be kept as further experts (`online.memory`). When one of them is
trusted most, training goes on from it.

Unlike the published code: losses are comparable numbers in [0, 1], trust follows from all of them
with a fixed share, the experts do not restart from the merged weights, and the base is always one
of them.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from adaspec.drafters.config import DrafterConfig
from adaspec.drafters.network import BlockDrafter
from online.batch import BlockBatch
from online.config import LearnConfig
from online.evaluator import Evaluator
from online.hedge import Hedge
from online.memory import Memory
from online.target import TargetMatrices
from online.trainer import StepReport, Trainer, Training
from online.trajectory import Trajectory

_RECALLED = 0.5  # trust at which training goes on from what is remembered


class Ensemble:
    """Trainers that differ in their learning rate, and whom to trust.

    Args:
        network: shape of the drafters, one of which is made for each expert.
        base: weights of the base, with the types that versions are published in.
    """

    def __init__(
        self,
        network: DrafterConfig,
        target: TargetMatrices,
        config: LearnConfig,
        base: Mapping[str, Tensor],
        evaluator: Evaluator,
    ) -> None:
        settings = config.ensemble
        self._base = dict(base)
        self._play = settings.play
        self._evaluator = evaluator
        device = target.embedding.device
        self._experts = [
            Trainer(BlockDrafter(network).to(device), target, _at_rate(config, rate))
            for rate in settings.rates
        ]
        self._memory = Memory(settings.memories, config.pace.drift)
        self._fixed = 1 + settings.memories  # experts that do not train, the base first
        self._hedge = Hedge(self._fixed + len(self._experts), settings.eagerness, settings.share)
        self.steps = 0
        self.skipped_steps = 0
        self.tokens_seen = 0
        self.restart_from(base)

    @property
    def trust(self) -> tuple[float, ...]:
        """Weight of each expert: the base, the remembered ones, those in training. Sum: 1."""
        return tuple(self._hedge.weights.tolist())

    @property
    def optimiser_steps(self) -> int:
        """Steps since the optimisers' memory was last forgotten."""
        return self._experts[0].optimiser_steps

    def observe(self, fresh: Sequence[Trajectory]) -> None:
        """Let every expert draft trajectories that none was trained on, and trust accordingly.

        A trajectory is a round; its loss is the target passes per committed token, 1 less the
        share of the tokens that were accepted drafts.
        """
        if not fresh:
            return
        base = self._evaluator.candidate(self._base, fresh)
        # An empty memory stands for the base.
        walks = [
            base,
            *(self._evaluator.candidate(w, fresh) if w else base for w in self._memory.kept),
            *(self._evaluator.candidate(e.export(self._base), fresh) for e in self._experts),
        ]
        for round_ in zip(*walks, strict=True):
            if round_[0].committed:
                losses = np.array([w.passes / w.committed for w in round_])
                self._hedge.observe(losses)
                self._memory.observe(float(losses[0]), lambda: self.export(self._base))
        self._recall()

    def step(self, batch: Sequence[BlockBatch]) -> StepReport:
        """One optimiser step of every expert; the report of the most trusted one that trains."""
        reports = [expert.step(batch) for expert in self._experts]
        # One bad expert is as good as none: the others do not wait for it.
        applied = any(report.applied for report in reports)
        trusted = int(self._hedge.weights[self._fixed :].argmax())
        report = reports[trusted]._replace(applied=applied)
        self.steps += applied
        self.tokens_seen += report.tokens * applied
        self.skipped_steps += report.skipped
        return report

    def export(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is played, on the CPU."""
        weights = self._hedge.weights
        if self._play == "leader":
            leader = int(weights.argmax())
            source = self._weights(leader, like)
            return {name: source[name].to(tensor.dtype) for name, tensor in like.items()}
        everything = {name: tensor.float() for name, tensor in like.items()}
        parts = [self._weights(expert, everything) for expert in range(len(weights))]
        return {
            name: sum(
                (float(w) * part[name].float() for w, part in zip(weights, parts, strict=True)),
                start=tensor.float() * 0,
            ).to(tensor.dtype)
            for name, tensor in like.items()
        }

    def restart_from(self, tensors: Mapping[str, Tensor]) -> None:
        """All experts start from these weights, equally trusted; the base stays what it is."""
        for expert in self._experts:
            expert.restart_from(tensors)
        self._hedge.reset()

    def state_tensors(self) -> dict[str, Tensor]:
        """``INDEX/...`` of experts, and ``memory/...``; trust is earned anew after a restart."""
        tensors = {
            f"{index}/{name}": tensor
            for index, expert in enumerate(self._experts)
            for name, tensor in expert.state_tensors().items()
        }
        remembered = self._memory.state_tensors()
        return tensors | {f"memory/{name}": tensor for name, tensor in remembered.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimiser_steps: int) -> None:
        """Take back what `state_tensors` gave; see `Trainer.load_state_tensors`."""
        for index, expert in enumerate(self._experts):
            expert.load_state_tensors(_under(tensors, f"{index}/"), optimiser_steps)
        self._memory.load_state_tensors(_under(tensors, "memory/"), self._base)

    def _weights(self, expert: int, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """An expert's weights, those in training in the types of ``like``."""
        if expert >= self._fixed:
            return self._experts[expert - self._fixed].export(like)
        kept = self._memory.kept[expert - 1] if expert else None
        return kept or self._base

    def _recall(self) -> None:
        """Go on from what is remembered, once it is trusted more than all others."""
        leader = int(self._hedge.weights.argmax())
        if not 1 <= leader < self._fixed or self._hedge.weights[leader] < _RECALLED:
            return
        for expert in self._experts:
            expert.restart_from(self._weights(leader, self._base))
        self._hedge.divide(leader, range(self._fixed, len(self._hedge.weights)))


def build_training(
    network: DrafterConfig,
    target: TargetMatrices,
    config: LearnConfig,
    base: Mapping[str, Tensor],
    evaluator: Evaluator,
) -> Training:
    """What the settings ask for, with the weights of the base."""
    if config.ensemble.rates:
        return Ensemble(network, target, config, base, evaluator)
    trainer = Trainer(BlockDrafter(network).to(target.embedding.device), target, config)
    trainer.restart_from(base)
    return trainer


def _at_rate(config: LearnConfig, factor: float) -> LearnConfig:
    settings = config.optimiser
    optimiser = msgspec.structs.replace(settings, learning_rate=settings.learning_rate * factor)
    return msgspec.structs.replace(config, optimiser=optimiser)


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
