"""Training steps on feedback: float32 master weights, AdamW, and a guard against bad numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.acceptance import prefix_length
from adaspec.drafters.heads import LengthHead
from adaspec.drafters.loss import length_head_loss
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.versions import is_context_weight
from online.batch import BlockBatch
from online.config import LearnConfig
from online.objective import mixed_objective
from online.packing import PackedBlocks, pack
from online.target import TargetMatrices

# Padded context rows that exist at a time.
_CONTEXT_ROWS = 16384


class StepReport(NamedTuple):
    """What an optimiser step did.

    Attributes:
        applied: False if the loss or a gradient was not finite; nothing has changed then.
        loss, cross_entropy, reverse_kl: weighted means over the counted positions, before the step.
        accuracy: weighted share of positions whose argmax is the label.
        tokens: positions that counted.
    """

    applied: bool
    loss: float
    cross_entropy: float
    reverse_kl: float
    accuracy: float
    tokens: int

    @property
    def skipped(self) -> bool:
        """There was something to learn, but no finite gradient."""
        return self.tokens > 0 and not self.applied


class Trainer:
    """Owns the weights in training.

    Args:
        drafter: float32, on the device to train on; changed in place.
        target: on the same device.
    """

    def __init__(self, drafter: BlockDrafter, target: TargetMatrices, config: LearnConfig) -> None:
        self.drafter = drafter
        self._target = target
        self._config = config
        self._device = target.embedding.device
        self.steps = 0
        self.skipped_steps = 0
        self.tokens_seen = 0
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(is_trained(name, config.mode == "full"))
        self._parameters = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        self._optimiser = self._new_optimiser()

    def step(self, batch: Sequence[BlockBatch]) -> StepReport:
        """One optimiser step on the blocks of several trajectories."""
        total = sum(float(part.weights.sum()) for part in batch)
        tokens = sum(part.tokens for part in batch)
        if total == 0:
            return StepReport(False, 0.0, 0.0, 0.0, 0.0, 0)
        self._optimiser.zero_grad(set_to_none=True)
        sums = torch.zeros(4, device=self._device)
        for blocks in pack(batch, self.drafter.config, self._device, _CONTEXT_ROWS):
            sums += self._accumulate(blocks, total)
        # Apart: the head reads detached states, and neither should shorten the other's step.
        norms = [
            torch.nn.utils.clip_grad_norm_(group["params"], self._config.optimiser.clip_norm)
            for group in self._optimiser.param_groups
            if group["params"]
        ]
        loss, cross_entropy, reverse_kl, accuracy = sums.tolist()
        # A finite norm means that every gradient is finite.
        applied = bool(torch.isfinite(torch.stack([*norms, *sums])).all())
        if applied:
            self._set_learning_rate()
            self._optimiser.step()
            self.steps += 1
            self.tokens_seen += tokens
        else:
            self.skipped_steps += 1
        self._optimiser.zero_grad(set_to_none=True)
        return StepReport(applied, loss, cross_entropy, reverse_kl, accuracy, tokens)

    def export(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights on the CPU, in the types they are published in.

        Args:
            like: weights whose names and types are used.
        """
        parameters = dict(self.drafter.named_parameters())
        return {
            name: parameters[name].detach().to("cpu", tensor.dtype, copy=True)
            for name, tensor in like.items()
        }

    def restart_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights and forget the optimiser's moments; counters go on."""
        parameters = dict(self.drafter.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        self._optimiser = self._new_optimiser()

    def state_tensors(self) -> dict[str, Tensor]:
        """Trained weights and moments, named ``weight/NAME``, ``mean/NAME``, ``square/NAME``."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"weight/{name}"] = parameter.detach()
            state = self._optimiser.state.get(parameter)
            if state:
                tensors[f"mean/{name}"] = state["exp_avg"]
                tensors[f"square/{name}"] = state["exp_avg_sq"]
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimiser_steps: int) -> None:
        """Take back what `state_tensors` gave.

        Args:
            optimiser_steps: steps since the moments were last forgotten.

        Raises:
            AdaSpecError: if a weight or moment is missing, has another shape or is not finite;
                nothing has changed then.
        """
        damaged = [n for n, p in self._parameters.items() if not _is_whole(tensors, n, p.shape)]
        if damaged:
            raise AdaSpecError(
                f"the learner's saved state is damaged ({', '.join(damaged)}); delete it, or let "
                "training start again from the live version."
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"weight/{name}"])
                if f"mean/{name}" in tensors:
                    self._optimiser.state[parameter] = {
                        "step": torch.tensor(float(optimiser_steps)),
                        "exp_avg": tensors[f"mean/{name}"].to(self._device, copy=True),
                        "exp_avg_sq": tensors[f"square/{name}"].to(self._device, copy=True),
                    }

    @property
    def optimiser_steps(self) -> int:
        """Steps since the moments were last forgotten."""
        for state in self._optimiser.state.values():
            return int(state["step"])
        return 0

    def _accumulate(self, blocks: PackedBlocks, total: float) -> Tensor:
        """Add the gradient of a packed batch; its share of the reported sums."""
        objective, drafter = self._config.objective, self.drafter
        mixed = torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"
        )
        with mixed:
            with torch.set_grad_enabled(self._config.mode == "full"):
                context = drafter.context_features(blocks.taps)
            noise = F.embedding(blocks.tokens, self._target.embedding).to(context.dtype)
            hidden = drafter.forward_blocks(context, blocks.anchors, noise)
        result = mixed_objective(
            hidden[:, :, 1:][blocks.counted],
            blocks.labels,
            blocks.teacher,
            blocks.weights / total,
            self._target.lm_head,
            objective.alpha,
            objective.clip,
            objective.chunk_rows,
        )
        loss = result.loss
        head = drafter.thresh_head_two_model
        if head is not None:
            share = blocks.weights.sum() / total  # of the step's batch; stays on the device
            loss = loss + share * _length_error(head, hidden, blocks, result.matches)
        loss.backward()  # type: ignore[no-untyped-call]
        sums = result.loss, result.cross_entropy, result.reverse_kl, result.correct
        return torch.stack([part.detach() for part in sums])

    def _new_optimiser(self) -> torch.optim.AdamW:
        settings = self._config.optimiser
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in self._parameters.items() if not _is_of_head(n)]},
                {"params": [p for n, p in self._parameters.items() if _is_of_head(n)]},
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    def _set_learning_rate(self) -> None:
        settings = self._config.optimiser
        warm = min(1.0, (self.optimiser_steps + 1) / (settings.warmup_steps + 1))
        rates = settings.learning_rate, settings.head_learning_rate
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * warm


def _is_whole(tensors: Mapping[str, Tensor], name: str, shape: torch.Size) -> bool:
    """Whether a weight was saved, with both of its moments or neither."""
    names = [f"weight/{name}"]
    moments = [f"mean/{name}", f"square/{name}"]
    if any(moment in tensors for moment in moments):
        names += moments
    saved = [tensors.get(key) for key in names]
    return all(t is not None and t.shape == shape and bool(torch.isfinite(t).all()) for t in saved)


def is_trained(name: str, full: bool) -> bool:
    """Whether online training changes a parameter."""
    return full or not is_context_weight(name)


def _is_of_head(name: str) -> bool:
    return name.startswith("thresh_head_two_model.")


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
