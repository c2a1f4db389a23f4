"""The offline training loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.acceptance import prefix_length
from adaspec.drafters.blocks import block_labels, block_token_ids, sample_anchors
from adaspec.drafters.loss import block_cross_entropy, length_head_loss
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.training.batches import Batch, endless, pad
from adaspec.training.config import TrainConfig
from adaspec.training.evaluate import AcceptanceReport, simulate
from adaspec.training.journal import Journal
from adaspec.training.optim import learning_rate, make_optimisers, set_learning_rate
from adaspec.training.target_model import TargetModel
from adaspec.training.trajectories import Trajectory

Progress = Callable[[float, str], None]


class StepResult(NamedTuple):
    """What one training step measured; tensors stay on the device until they are logged.

    Attributes:
        loss: weighted cross-entropy, nats.
        prefix: mean accepted drafts of a block whose labels are all counted or end the response.
        blocks: blocks that had labels.
        length_error: mean squared error of the length head, shares of a block; 0 without one.
    """

    loss: Tensor
    prefix: Tensor
    blocks: Tensor
    length_error: Tensor


class Trainer:
    """Trains a drafter on trajectories; everything that changes is in `state`."""

    def __init__(
        self,
        config: TrainConfig,
        drafter: BlockDrafter,
        target: TargetModel,
        trajectories: Sequence[Trajectory],
        heldout: Mapping[str, Sequence[Trajectory]],
    ) -> None:
        """Prepare a run.

        Args:
            drafter: float32 weights on the target's device; trained in place.
            heldout: named sets of greedy trajectories for evaluation.

        Raises:
            AdaSpecError: if there is nothing to train on.
        """
        self.config, self.drafter, self.target = config, drafter, target
        self.trajectories = [t for t in trajectories if t.response_length > 1]
        self.heldout = heldout
        if not self.trajectories:
            raise AdaSpecError(
                "no trajectory has two response tokens, so there is nothing to train on; give more "
                "prompts or a larger generate.max_new_tokens."
            )
        self.optimisers = make_optimisers(drafter, config.optim)
        self.random = torch.Generator(target.device).manual_seed(config.seed)
        self.step = 0
        self.elapsed = 0.0
        self._reports: tuple[int, dict[str, AcceptanceReport]] | None = None

    def state(self) -> dict[str, Any]:
        """Everything needed to go on exactly here."""
        return {
            "config": msgspec.json.encode(self.config),
            "trajectories": len(self.trajectories),
            "drafter": self.drafter.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "random": self.random.get_state(),
            "step": self.step,
            "elapsed": self.elapsed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            AdaSpecError: if it belongs to another configuration or other data.
        """
        same_data = state["trajectories"] == len(self.trajectories)
        if state["config"] != msgspec.json.encode(self.config) or not same_data:
            raise AdaSpecError(
                "the checkpoint belongs to another configuration or other trajectories; use the "
                "same ones, or another output directory."
            )
        self.drafter.load_state_dict(state["drafter"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.random.set_state(state["random"].cpu())
        self.step, self.elapsed = state["step"], state["elapsed"]

    def run(
        self,
        journal: Journal,
        checkpoint: Path | None = None,
        progress: Progress = lambda share, text: None,
    ) -> dict[str, AcceptanceReport]:
        """Train to the end of the schedule and evaluate.

        Args:
            checkpoint: file to save `state` to now and then.
            progress: called with the share done and a short text.
        """
        config = self.config
        lengths = [len(t.tokens) for t in self.trajectories]
        batches = endless(lengths, config.data.tokens_per_batch, config.seed, self.step)
        started = time.monotonic() - self.elapsed
        while (share := self._share_done()) < 1.0:
            epoch, indices = next(batches)
            lr = learning_rate(config.optim, share)
            set_learning_rate(self.optimisers, lr)
            batch = pad([self.trajectories[i] for i in indices], self.target.device)
            result = self.train_step(batch)
            self.step += 1
            if self.step % config.log_every == 0:
                # Reading the loss waits for the device, so the clock is right at this point.
                loss = float(result.loss)
                self.elapsed = time.monotonic() - started
                journal.write(
                    "train",
                    self.step,
                    epoch=epoch,
                    loss=loss,
                    prefix=float(result.prefix),
                    lr=lr,
                    blocks=int(result.blocks),
                    length_error=float(result.length_error),
                    seconds=round(self.elapsed, 2),
                )
                progress(share, f"step {self.step}  loss {loss:.3f}")
            elif config.optim.max_seconds is not None:
                self.elapsed = time.monotonic() - started
            if self.step % config.evaluate_every == 0:
                self.evaluate(journal)
            if checkpoint is not None and self.step % config.checkpoint_every == 0:
                save_state(checkpoint, self.state())
        if self._reports is None or self._reports[0] != self.step:
            self.evaluate(journal)
        if checkpoint is not None:
            save_state(checkpoint, self.state())
        assert self._reports is not None
        return self._reports[1]

    def train_step(self, batch: Batch) -> StepResult:
        """One optimiser step on one batch."""
        config, shape = self.config, self.drafter.config
        target = self.target
        taps, final = target.read(batch.tokens, shape.target_layer_ids)
        teacher = target.greedy_tokens(final, batch.loss_mask)
        anchors, kept = sample_anchors(
            batch.loss_mask,
            max(1, config.data.blocks_per_batch // batch.tokens.shape[0]),
            self.random,
        )
        labels = block_labels(
            anchors, kept, batch.tokens, teacher, batch.loss_mask, shape.block_size
        )
        blocks = block_token_ids(
            batch.tokens.gather(1, anchors), shape.block_size, shape.mask_token_id
        )
        noise = F.embedding(blocks, target.embedding).float()
        half = target.embedding.dtype == torch.bfloat16
        with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
            context = self.drafter.context_features(taps)
            hidden = self.drafter.forward_blocks(context, anchors, noise)
        loss, correct = block_cross_entropy(
            hidden[..., 1:, :],
            labels.tokens,
            labels.valid,
            target.lm_head,
            config.loss_decay,
            config.loss_chunk_rows,
        )
        accepted, kept = prefix_length(correct), labels.valid[..., 0]
        length_error = self._length_error(hidden, accepted, kept)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        (loss + length_error).backward()  # type: ignore[no-untyped-call]
        # Apart: the head reads detached states, and neither should shorten the other's step.
        head = self.drafter.thresh_head_two_model
        for parameters in (self.drafter.body_parameters(), head.parameters() if head else ()):
            torch.nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip)
        for optimiser in self.optimisers:
            optimiser.step()
        counted = kept.sum()
        return StepResult(
            loss.detach(),
            accepted.sum() / counted.clamp(min=1),
            counted,
            length_error.detach(),
        )

    def _length_error(self, hidden: Tensor, accepted: Tensor, kept: Tensor) -> Tensor:
        head = self.drafter.thresh_head_two_model
        if head is None:
            return hidden.new_zeros((), dtype=torch.float32)
        shares = head(hidden.detach().float())
        return length_head_loss(shares, accepted, kept, self.drafter.config.block_size)

    def evaluate(self, journal: Journal) -> dict[str, AcceptanceReport]:
        """Simulated committed tokens per target pass on every held-out set."""
        self.drafter.eval()
        reports = {
            name: simulate(
                self.drafter,
                self.target,
                trajectories,
                self.config.data.tokens_per_batch,
                self.config.data.blocks_per_batch,
            )
            for name, trajectories in self.heldout.items()
        }
        self.drafter.train()
        for name, report in reports.items():
            journal.write(
                "heldout",
                self.step,
                set=name,
                committed_per_pass=report.committed_per_pass,
                survival=report.survival,
                responses=report.responses,
                passes=report.passes,
            )
        self._reports = (self.step, reports)
        return reports

    def _share_done(self) -> float:
        optim = self.config.optim
        share = self.step / optim.max_steps
        if optim.max_seconds is not None:
            share = max(share, self.elapsed / optim.max_seconds)
        return share


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a training checkpoint, atomically."""
    temporary = path.with_name(f".{path.name}.new")
    torch.save(dict(state), temporary)
    temporary.replace(path)


def load_state(path: Path) -> dict[str, Any]:
    """Read a training checkpoint.

    Raises:
        AdaSpecError: if the file is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise AdaSpecError(
            f"the training checkpoint {path} cannot be read ({error}); delete it to start again."
        ) from None
    return state
