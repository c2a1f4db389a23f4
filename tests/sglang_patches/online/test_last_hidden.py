"""SGLang returns the input of the lm_head when it is told to, from every kind of verify pass."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import (
    LogitsMetadata,
    LogitsProcessor,
    LogitsProcessorOutput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from torch import nn

from adaspec.errors import AdaSpecError
from sglang_patches.online.last_hidden import keep_last_hidden_states

VOCAB, HIDDEN, ROWS = 12, 4, 6


class Target(nn.Module):
    """A model of logits processors only."""

    def __init__(self, count: int = 1, **config: float) -> None:
        super().__init__()
        scale = {name: config.pop(name) for name in list(config) if name == "logit_scale"}
        settings = SimpleNamespace(vocab_size=VOCAB, **config)
        self.processors = nn.ModuleList(LogitsProcessor(settings, **scale) for _ in range(count))


def verify(target: Target) -> tuple[LogitsProcessorOutput, torch.Tensor, torch.Tensor]:
    """A verify pass over random states; its output, the states and the lm_head."""
    states, lm_head = torch.randn(ROWS, HIDDEN), nn.Embedding(VOCAB, HIDDEN)
    metadata = LogitsMetadata(ForwardMode.TARGET_VERIFY, CaptureHiddenMode.FULL)
    (processor,) = target.processors
    with torch.no_grad():
        output = processor(
            torch.zeros(ROWS, dtype=torch.int64),
            states,
            lm_head,
            metadata,
            [states * 2, states * 3],
        )
    return output, states, lm_head.weight


def test_a_verify_pass_returns_the_states_its_logits_are_made_of(sglang_process: None) -> None:
    target = Target()
    assert verify(target)[0].last_hidden_states is None
    keep_last_hidden_states(target)
    output, states, lm_head = verify(target)
    assert torch.equal(output.last_hidden_states, states)
    torch.testing.assert_close(output.last_hidden_states @ lm_head.T, output.next_token_logits)
    assert output.hidden_states.shape == (ROWS, 2 * HIDDEN)  # the taps, as before


@pytest.mark.parametrize("config", [{"final_logit_softcapping": 30.0}, {"logit_scale": 0.5}])
def test_targets_with_other_logits_are_refused(
    sglang_process: None, config: dict[str, float]
) -> None:
    with pytest.raises(AdaSpecError, match="scales or caps its logits"):
        keep_last_hidden_states(Target(**config))


@pytest.mark.parametrize("count", [0, 2])
def test_targets_without_the_one_place_are_refused(sglang_process: None, count: int) -> None:
    with pytest.raises(AdaSpecError, match=f"{count} logits processors"):
        keep_last_hidden_states(Target(count))


def test_graph_replays_hand_on_the_rows_of_the_batch() -> None:
    assert "last_hidden_states" in {f.name for f in dataclasses.fields(LogitsProcessorOutput)}
    source = inspect.getsource(DecodeCudaGraphRunner)
    assert "output.last_hidden_states[: self.raw_num_token]" in source


def test_workers_are_made_before_graphs_are_captured() -> None:
    source = inspect.getsource(Scheduler.init_model_worker)
    worker = source.index("self.maybe_init_draft_worker()")
    assert worker < source.index("self.init_all_cuda_graphs()")
