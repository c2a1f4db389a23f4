"""What the online loop takes from SGLang exists, and SGLang calls what it overrides."""

import inspect

import pytest
from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_patches.online import last_hidden, loop, namespace, tap, weights
from sglang_patches.worker.worker import AdaSpecWorker
from tests.sglang_patches import upstream_use as use

RECEIVERS: dict[str, type] = {
    "worker": AdaSpecWorker,
    "batch": ScheduleBatch,
    "req": Req,
    "r": Req,
    "reqs[i]": Req,
    "params": SamplingParams,
    "helper": FusedKVMaterializeHelper,
    "output": LogitsProcessorOutput,
    "processor": LogitsProcessor,
}
MODULES = (last_hidden, loop, namespace, tap, weights)
ATTRIBUTES = sorted(
    {pair for module in MODULES for pair in use.attributes(module, RECEIVERS)},
    key=lambda pair: (pair[0].__name__, pair[1]),
)
IMPORTS = sorted({source for module in MODULES for source in use.imports(module).values()})


def test_the_syntax_trees_were_read() -> None:
    assert {(Req, "lora_id"), (ScheduleBatch, "extend_lens")} <= set(ATTRIBUTES)
    assert (FusedKVMaterializeHelper, "flat_kv_weight_t") in ATTRIBUTES


@pytest.mark.parametrize(
    ("cls", "name"), ATTRIBUTES, ids=[f"{c.__name__}.{name}" for c, name in ATTRIBUTES]
)
def test_attribute_exists(cls: type, name: str) -> None:
    assert name in use.members(cls)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_import_exists(module: str, name: str) -> None:
    assert use.resolve(module, name) is not None


@pytest.mark.parametrize("name", ["on_verify_complete_cpu", "note_request_finished"])
def test_the_scheduler_calls_our_callbacks(name: str) -> None:
    ours, upstream = (inspect.signature(getattr(c, name)) for c in (AdaSpecWorker, BaseSpecWorker))
    assert list(ours.parameters) == list(upstream.parameters)
    assert f".{name}(" in inspect.getsource(batch_result_processor)


def test_a_prefill_and_nothing_else_passes_extend_lens() -> None:
    name = "_append_target_hidden_to_draft_kv_by_loc"
    assert "extend_lens" in inspect.signature(getattr(DFlashWorkerV2, name)).parameters
    source = inspect.getsource(DFlashWorkerV2.forward_batch_generation)
    assert source.count("extend_lens=ctx_lens") == 1
