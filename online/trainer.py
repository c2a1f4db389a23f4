"""Training steps on feedback: float32 master weights, and a guard against bad numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaspec.acceptance import prefix_length
from adaspec.drafters.heads import LengthHead
from adaspec.drafters.loss import length_head_loss
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.versions import is_context_weight
from online import low_rank
from online.batch import BlockBatch
from online.config import LearnConfig
from online.objectives import build_objective, objective_loss
from online.optimiser import Optimiser, is_whole
from online.packing import PackedBlocks, pack
from online.target import TargetMatrices
from online.trajectory import Trajectory

# Padded context rows that exist at a time.
_CONTEXT_ROWS = 16384


class StepReport(NamedTuple):
    """What an optimiser step did.

    Attributes:
        applied: False if the loss or a gradient was not finite; nothing has changed then.
        loss, cross_entropy, divergence: weighted means over the counted positions, before the step;
            the divergence is the one that the objective is about, if any.
        accuracy: weighted share of positions whose argmax is the label.
        tokens: positions that counted.
    """

    applied: bool
    loss: float
    cross_entropy: float
    divergence: float
    accuracy: float
    tokens: int

    @property
    def skipped(self) -> bool:
        """There was something to learn, but no finite gradient."""
        return self.tokens > 0 and not self.applied


class Training(Protocol):
    """Weights in training, as the learner sees them: one `Trainer`, or an `Ensemble` of them.

    Attributes:
        steps, skipped_steps, tokens_seen: totals; they go on over restarts.
    """

    steps: int
    skipped_steps: int
    tokens_seen: int

    @property
    def optimiser_steps(self) -> int:
        """Steps since the optimiser's memory was last forgotten."""

    @property
    def trust(self) -> tuple[float, ...]:
        """Weight of each expert, the base first; empty where there is only one."""

    def observe(self, fresh: Sequence[Trajectory]) -> None:
        """See trajectories that were never trained on, before they are."""

    def step(self, batch: Sequence[BlockBatch]) -> StepReport:
        """One optimiser step on the blocks of several trajectories."""

    def export(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights on the CPU, under the names and in the types of ``like``."""

    def restart_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights and forget the optimiser's memory; totals go on."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a restart goes on from, by name."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimiser_steps: int) -> None:
        """Take back what `state_tensors` gave, or raise `AdaSpecError` and change nothing."""


class Trainer:
    """Owns the weights in training.

    Args:
        drafter: float32, on the device to train on; changed in place.
        target: on the same device.
    """

    trust: tuple[float, ...] = ()

    def __init__(self, drafter: BlockDrafter, target: TargetMatrices, config: LearnConfig) -> None:
        self.drafter = drafter
        self._target = target
        self._config = config
        self._objective = build_objective(config.objective)
        self._device = target.embedding.device
        self.steps = 0
        self.skipped_steps = 0
        self.tokens_seen = 0
        self._parameters = _choose_parameters(drafter, config)
        self._optimiser = self._new_optimiser()

    def observe(self, fresh: Sequence[Trajectory]) -> None:
        """Nothing to decide: there is one set of weights."""

    def step(self, batch: Sequence[BlockBatch]) -> StepReport:
        """One optimiser step on the blocks of several trajectories."""
        total = sum(float(part.weights.sum()) for part in batch)
        tokens = sum(part.tokens for part in batch)
        if total == 0:
            return StepReport(False, 0.0, 0.0, 0.0, 0.0, 0)
        self._optimiser.clear()
        sums = torch.zeros(4, device=self._device)
        for blocks in pack(batch, self.drafter.config, self._device, _CONTEXT_ROWS):
            sums += self._accumulate(blocks, total)
        norms = self._optimiser.clip()
        loss, cross_entropy, divergence, accuracy = sums.tolist()
        # A finite norm means that every gradient is finite.
        applied = bool(torch.isfinite(torch.cat([norms, sums])).all())
        if applied:
            self._optimiser.step()
            self.steps += 1
            self.tokens_seen += tokens
        else:
            self.skipped_steps += 1
        self._optimiser.clear()
        return StepReport(applied, loss, cross_entropy, divergence, accuracy, tokens)

    def export(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights on the CPU, in the types they are published in.

        Args:
            like: weights whose names and types are used.
        """
        return {
            name: low_rank.effective(self.drafter, name).to("cpu", tensor.dtype, copy=True)
            for name, tensor in like.items()
        }

    def restart_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights and forget the optimiser's memory; counters go on."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                low_rank.original(self.drafter, name).copy_(tensor)
        low_rank.clear(self.drafter)
        self._optimiser = self._new_optimiser()

    def state_tensors(self) -> dict[str, Tensor]:
        """Trained weights, ``weight/NAME``, and the optimiser's memory."""
        tensors = {f"weight/{name}": p.detach() for name, p in self._parameters.items()}
        tensors |= self._optimiser.state_tensors()
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimiser_steps: int) -> None:
        """Take back what `state_tensors` gave.

        Args:
            optimiser_steps: steps since the optimiser's memory was last forgotten.

        Raises:
            AdaSpecError: if a tensor is missing, has another shape or is not finite; nothing has
                changed then.
        """
        damaged = [
            n
            for n, p in self._parameters.items()
            if not is_whole(tensors.get(f"weight/{n}"), p.shape)
        ]
        if damaged:
            raise AdaSpecError(
                f"the learner's saved state is damaged ({', '.join(damaged)}); delete it, or let "
                "training start again from the live version."
            )
        self._optimiser.load_state_tensors(tensors, optimiser_steps)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"weight/{name}"])

    @property
    def optimiser_steps(self) -> int:
        """Steps since the optimiser's memory was last forgotten."""
        return self._optimiser.steps

    def _accumulate(self, blocks: PackedBlocks, total: float) -> Tensor:
        """Add the gradient of a packed batch; its share of the reported sums."""
        drafter = self.drafter
        mixed = torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"
        )
        with mixed:
            with torch.set_grad_enabled(self._config.mode == "full"):
                context = drafter.context_features(blocks.taps)
            noise = F.embedding(blocks.tokens, self._target.embedding).to(context.dtype)
            hidden = drafter.forward_blocks(context, blocks.anchors, noise)
        result = objective_loss(
            self._objective,
            hidden[:, :, 1:][blocks.counted],
            blocks,
            total,
            self._target.lm_head,
            self._config.objective.chunk_rows,
        )
        loss = result.loss
        head = drafter.thresh_head_two_model
        if head is not None:
            share = blocks.weights.sum() / total  # of the step's batch; stays on the device
            loss = loss + share * _length_error(head, hidden, blocks, result.matches)
        loss.backward()  # type: ignore[no-untyped-call]
        sums = result.loss, result.cross_entropy, result.divergence, result.correct
        return torch.stack([part.detach() for part in sums])

    def _new_optimiser(self) -> Optimiser:
        of_head = frozenset(filter(_is_of_head, self._parameters))
        return Optimiser(self._parameters, of_head, self._config.optimiser)


def is_trained(name: str, full: bool) -> bool:
    """Whether online training changes a parameter in a mode."""
    return full or not is_context_weight(name)


def _is_of_head(name: str) -> bool:
    return name.startswith("thresh_head_two_model.")


def _choose_parameters(drafter: BlockDrafter, config: LearnConfig) -> dict[str, nn.Parameter]:
    """Let the parameters in scope have gradients, and no others."""
    scope, full = config.scope, config.mode == "full"
    layers = range(drafter.config.num_hidden_layers)
    late = tuple(f"layers.{i}." for i in layers[-scope.layers :])
    names = [name for name, _ in drafter.named_parameters() if is_trained(name, full)]
    if scope.weights == "last-layers":
        names = [n for n in names if n.startswith((*late, "norm.")) or _is_of_head(n)]
    elif scope.weights == "low-rank":
        heads = [name for name in names if _is_of_head(name)]
        matrices = [n for n in names if n not in heads and drafter.get_parameter(n).dim() == 2]
        names = low_rank.attach(drafter, matrices, scope.rank) + heads
    parameters = {name: p for name, p in drafter.named_parameters() if name in names}
    for parameter in drafter.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters


def _length_error(
    head: LengthHead, hidden: Tensor, blocks: PackedBlocks, matches: Tensor
) -> Tensor:
    """The length head's error on blocks behind random anchors whose run of matches is known.

    A really drafted block counts to its first rejection only, so how much of it the drafter would
    have accepted now is not known if that is more.
    """
    hits = torch.zeros_like(blocks.counted)
    hits[blocks.counted] = matches
    has_missed = (blocks.counted & ~hits).any(-1)
    kept = blocks.is_random & blocks.counted[..., 0] & (has_missed | blocks.counted.all(-1))
    shares = head(hidden.detach().float())
    return length_head_loss(shares, prefix_length(hits), kept, hidden.shape[-2])
