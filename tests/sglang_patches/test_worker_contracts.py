"""Everything the worker and the algorithm take from SGLang exists and is called as it asks."""

import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import resolution_hooks, speculative_hook
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adaspec.chains import ChainRows
from sglang_patches import algorithm, checks
from sglang_patches.algorithm import AdaSpecAlgorithm
from sglang_patches.version import SGLANG_VERSION
from sglang_patches.worker import (
    accept,
    draft,
    history,
    lengths,
    policy,
    probe,
    ragged_triton,
    report,
    verify,
    worker,
)
from sglang_patches.worker.context import DraftContext
from sglang_patches.worker.worker import AdaSpecWorker
from tests.sglang_patches import upstream_use as use

MODULES = (
    *(algorithm, checks, accept, draft, history, lengths, policy, probe, ragged_triton, report),
    *(verify, worker),
)

# How our code names objects of upstream classes.
RECEIVERS: dict[str, type] = {
    "self": AdaSpecWorker,  # read in worker.py alone
    "worker": AdaSpecWorker,
    "batch": ScheduleBatch,
    "info": SamplingBatchInfo,
    "batch.sampling_info": SamplingBatchInfo,
    "draft_input": DFlashDraftInputV2,
    "verify_input": DFlashVerifyInput,
    "req": Req,
    "request": Req,
    "entry.request": Req,
    "p": SamplingParams,
    "params": SamplingParams,
    "request.sampling_params": SamplingParams,
    "target": GenerationBatchResult,
    "output": ModelRunnerOutput,
    "output.logits_output": LogitsProcessorOutput,
    "target.logits_output": LogitsProcessorOutput,
    "logits_output": LogitsProcessorOutput,
    "window.kv_plan": KVLocPlan,
    "args": ServerArgs,
    "server_args": ServerArgs,
}


def receivers(module: Any) -> dict[str, type]:
    return {name: cls for name, cls in RECEIVERS.items() if module is worker or name != "self"}


IMPORTS = sorted({source for module in MODULES for source in use.imports(module).values()})
CALLS = sorted({call for module in MODULES for call in use.calls(module)})
METHOD_CALLS = sorted(
    {call for module in MODULES for call in use.method_calls(module, receivers(module))},
    key=lambda pair: (pair[0].__name__, pair[1]),
)
ATTRIBUTES = sorted(
    {pair for module in MODULES for pair in use.attributes(module, receivers(module))},
    key=lambda pair: (pair[0].__name__, pair[1]),
)


def accepts(function: Any, call: use.Call, *, bound: int = 0) -> None:
    """Fails if ``function`` cannot be called with these arguments."""
    positional = [None] * (call.positional + bound)
    inspect.signature(function).bind(*positional, **dict.fromkeys(call.keywords))


def test_the_syntax_trees_were_read() -> None:
    # A guard on this test itself: what it is for must be among what it finds.
    names = {call.name for call in CALLS}
    assert {"ForwardBatch", "DFlashVerifyInput", "GrammarTree.from_linear_chain"} <= names
    methods = {call.name for _, call in METHOD_CALLS}
    assert {"_draft_write_ids", "bind", "prepare_for_verify"} <= methods
    assert (GenerationBatchResult, "routed_experts_output") in ATTRIBUTES


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_import_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_call_fits(call: use.Call) -> None:
    function = importlib.import_module(call.module)
    for part in call.name.split("."):
        function = getattr(function, part)
    accepts(function, call)


@pytest.mark.parametrize(
    ("cls", "call"), METHOD_CALLS, ids=[f"{c.__name__}.{m.name}" for c, m in METHOD_CALLS]
)
def test_method_call_fits(cls: type, call: use.Call) -> None:
    function = inspect.getattr_static(cls, call.name, None)
    if inspect.isfunction(function):
        accepts(function, call, bound=1)
    else:  # an object kept in an attribute, as `worker.history`
        assert call.name in use.members(cls)


@pytest.mark.parametrize(
    ("cls", "name"), ATTRIBUTES, ids=[f"{c.__name__}.{name}" for c, name in ATTRIBUTES]
)
def test_attribute_exists(cls: type, name: str) -> None:
    assert name in use.members(cls)


def test_the_decode_step_is_called_as_upstreams() -> None:
    ours = inspect.signature(AdaSpecWorker.forward_batch_generation)
    upstream = inspect.signature(DFlashWorkerV2.forward_batch_generation)
    assert list(ours.parameters) == list(upstream.parameters)
    ours, upstream = (inspect.signature(c.__init__) for c in (AdaSpecWorker, DFlashWorkerV2))
    assert list(ours.parameters) == list(upstream.parameters)


def test_context_is_appended_as_upstream_asks() -> None:
    asked = inspect.signature(DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc)
    tensor, row = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    rows = ChainRows.uniform(1, 2, tensor.device)
    shown: list[inspect.BoundArguments] = []
    for on_host in (True, False):
        context = DraftContext(
            lambda **places: shown.append(asked.bind(None, **places)), on_host=on_host
        )
        context.commit(rows, tensor, row[None], row, torch.tensor([2]))
        context.keep(("a", "b"), tensor, row, row)
        context.catch_up()
    assert len(shown) == 4


def overridden() -> list[str]:
    return [n for n, v in vars(AdaSpecAlgorithm).items() if inspect.isfunction(v) and n[0] != "_"]


@pytest.mark.parametrize("name", overridden())
def test_algorithm_overrides_what_sglang_asks(name: str) -> None:
    ours, upstream = getattr(AdaSpecAlgorithm, name), getattr(CustomSpecAlgo, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(upstream).parameters)


@pytest.fixture(scope="module")
def adaspec() -> AdaSpecAlgorithm:
    load_plugins()
    found = SpeculativeAlgorithm.from_string("adaspec")
    assert isinstance(found, AdaSpecAlgorithm)
    return found


@pytest.mark.parametrize(
    "question",
    [n for n in vars(SpeculativeAlgorithm) if n.startswith(("is_", "supports_", "has_"))],
)
def test_algorithm_answers_as_dflash(adaspec: AdaSpecAlgorithm, question: str) -> None:
    expected = getattr(SpeculativeAlgorithm.DFLASH, question)()
    if question == "supports_mixed_chunk":
        assert expected  # a registered algorithm has no such step, and SGLang then switches it off
        expected = False
    assert getattr(adaspec, question)() == expected


def test_questions_unknown_to_custom_algorithms_go_to_dflash(adaspec: AdaSpecAlgorithm) -> None:
    assert adaspec.value == SpeculativeAlgorithm.DFLASH.value


def test_sglang_makes_our_worker(adaspec: AdaSpecAlgorithm) -> None:
    assert adaspec.factory(None) is AdaSpecWorker
    assert adaspec.supports_overlap


def test_checks_run_before_sglang_reads_the_drafter(adaspec: AdaSpecAlgorithm) -> None:
    step = "handle_speculative_decoding"
    assert algorithm._check_first in resolution_hooks._HOOKS[step]
    # The reason for the hook: when upstream asks the algorithm first, the hook goes.
    source = inspect.getsource(speculative_hook.handle_speculative_decoding)
    reads = source.index("_resolve_speculative_algorithm_alias(")
    assert reads < source.index("algo.handle_server_args")


def test_the_pinned_release_is_the_one_that_is_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"sglang=={SGLANG_VERSION}" in project["dependencies"]
