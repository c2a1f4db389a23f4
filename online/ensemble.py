"""Several learning rates at once, the frozen base among them (OnlineSPEC, arXiv 2603.12617).

The best rate depends on drift that nobody knows beforehand. Every expert trains on the same batches
at a rate of its own; trust is earned by drafting trajectories that none has seen, before any trains
on them. One drafter is served: the average of the weights by trust, or the most trusted.

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
from online.target import TargetMatrices
from online.trainer import StepReport, Trainer, Training
from online.trajectory import Trajectory


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
        self._hedge = Hedge(len(self._experts) + 1, settings.eagerness, settings.share)
        self.steps = 0
        self.skipped_steps = 0
        self.tokens_seen = 0
        self.restart_from(base)

    @property
    def trust(self) -> tuple[float, ...]:
        """Weight of each expert, the base first; they sum to 1."""
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
        weights = [self._base, *(expert.export(self._base) for expert in self._experts)]
        walks = [self._evaluator.candidate(tensors, fresh) for tensors in weights]
        for round_ in zip(*walks, strict=True):
            if round_[0].committed:
                self._hedge.observe(np.array([w.passes / w.committed for w in round_]))

    def step(self, batch: Sequence[BlockBatch]) -> StepReport:
        """One optimiser step of every expert; the report of the most trusted one that trains."""
        reports = [expert.step(batch) for expert in self._experts]
        # One bad expert is as good as none: the others do not wait for it.
        applied = any(report.applied for report in reports)
        report = reports[int(self._hedge.weights[1:].argmax())]._replace(applied=applied)
        self.steps += applied
        self.tokens_seen += report.tokens * applied
        self.skipped_steps += report.skipped
        return report

    def export(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is played, on the CPU."""
        weights = self._hedge.weights
        if self._play == "leader":
            leader = int(weights.argmax())
            source = self._experts[leader - 1].export(like) if leader else self._base
            return {name: source[name].to(tensor.dtype) for name, tensor in like.items()}
        everything = {name: tensor.float() for name, tensor in like.items()}
        parts = [self._base, *(expert.export(everything) for expert in self._experts)]
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
        """Every expert's state, ``INDEX/...``; trust is earned anew after a restart."""
        return {
            f"{index}/{name}": tensor
            for index, expert in enumerate(self._experts)
            for name, tensor in expert.state_tensors().items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimiser_steps: int) -> None:
        """Take back what `state_tensors` gave; see `Trainer.load_state_tensors`."""
        for index, expert in enumerate(self._experts):
            own = {n.removeprefix(f"{index}/"): t for n, t in tensors.items() if _is_of(n, index)}
            expert.load_state_tensors(own, optimiser_steps)


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


def _is_of(name: str, index: int) -> bool:
    return name.startswith(f"{index}/")
