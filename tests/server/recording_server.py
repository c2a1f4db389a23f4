"""``python -m tests.server.recording_server``: a server that writes down what its draft model
computes.
"""

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.server.instrumented import launch, run_scheduler

RECORDS_VARIABLE = "ADASPEC_TEST_RECORDS"


class DraftPass(msgspec.Struct, frozen=True):
    """One pass of the served draft model.

    Attributes:
        request: id of each request of the batch.
        ids: ``[batch, block]`` int64, anchor and mask tokens.
        positions: ``[batch, block]`` int64.
        hidden: ``[batch, block, hidden]`` float32, final normed states.
        drafted: ``[batch, longest - 1]`` int64, the tokens that were proposed, as far as the
            longest chain of the batch goes.
    """

    request: list[str]
    ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    drafted: torch.Tensor


def read_passes(directory: Path) -> list[DraftPass]:
    """The passes written so far, in the order they ran."""
    passes = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            passes.append(DraftPass(file.metadata()["requests"].split(), **tensors))
    return passes


def run_recording_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler process."""
    run_scheduler(recording, *args, **kwargs)


def recording(base: type) -> type:
    """A worker class that writes down the passes of its draft model."""

    class RecordingWorker(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.notes: dict[str, torch.Tensor] = {}
            self.numbers = count()
            self.forward = self.draft_model_runner.forward
            self.draft_model_runner.forward = self.forward_and_note

        def forward_and_note(self, forward_batch: Any) -> Any:
            output = self.forward(forward_batch)
            noted = {
                "ids": forward_batch.input_ids,
                "positions": forward_batch.positions,
                "hidden": output.logits_output.hidden_states,
            }
            for name, rows in noted.items():
                self.notes[name] = rows.unflatten(0, (-1, self.block_size)).clone()
            return output

        def _judge(self, batch: Any, logits_output: Any, tokens: torch.Tensor, *args: Any) -> Any:
            self.notes["drafted"] = tokens[:, 1:].clone()
            return super()._judge(batch, logits_output, tokens, *args)

        def _decode(self, batch: Any, *args: Any) -> Any:
            self.notes.clear()
            result = super()._decode(batch, *args)
            if "hidden" in self.notes:  # a step may draft nothing
                _write(next(self.numbers), [req.rid for req in batch.reqs], self.notes)
            return result

    return RecordingWorker


def _write(number: int, requests: list[str], notes: Mapping[str, torch.Tensor]) -> None:
    path = Path(os.environ[RECORDS_VARIABLE]) / f"{number:06d}.safetensors"
    staged = path.with_suffix(".part")
    save_file(dict(notes), staged, metadata={"requests": " ".join(requests)})
    staged.rename(path)


if __name__ == "__main__":
    launch(run_recording_scheduler)
