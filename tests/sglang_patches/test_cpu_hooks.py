"""Every replacement takes effect, and serving is refused when one does not."""

import importlib
from typing import Any

import pytest
import torch
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins

from adaspec.errors import AdaSpecError
from sglang_patches.cpu import hooks
from sglang_patches.cpu.platform import AdaSpecCpuPlatform

pytestmark = pytest.mark.skipif(
    not isinstance(current_platform, AdaSpecCpuPlatform), reason="a GPU is present"
)

UNDO: dict[str, tuple[str, Any]] = {
    # target: (attribute to put back, its upstream value)
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": (
        "sglang.srt.speculative.spec_utils:assign_req_to_token_pool_func",
        lambda patched: patched.__wrapped__,
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs": (
        "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        lambda patched: patched.__wrapped__,
    ),
    "torch.Tensor.record_stream": (
        "torch:Tensor.record_stream",
        lambda patched: hooks._ORIGINAL_RECORD_STREAM,
    ),
    "sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only": (
        "sglang.srt.speculative.dflash_utils:tree_speculative_sampling_target_only",
        lambda patched: None,
    ),
}


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_plugins()


def test_the_entry_point_installs_everything() -> None:
    hooks.verify_installed()


def test_every_hook_is_covered_here() -> None:
    assert [hook.target for hook in hooks.HOOKS] == list(UNDO)


@pytest.mark.parametrize("target", list(UNDO))
def test_a_missing_replacement_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, original_of = UNDO[target]
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, original_of(getattr(owner, name)))
    with pytest.raises(AdaSpecError, match=target.replace(".", r"\.")):
        hooks.verify_installed()


def test_input_embeds_keep_the_models_dtype() -> None:
    from types import SimpleNamespace

    embeds = torch.tensor([1.0009765625])
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None)
    runner = SimpleNamespace(dtype=torch.float32)
    kwargs = {"input_embeds": embeds.bfloat16(), "other": 1}
    kept = hooks._keep_input_embeds_dtype(kwargs, runner, batch)
    assert torch.equal(kept["input_embeds"], embeds)
    assert kept["other"] == 1
    without = SimpleNamespace(input_embeds=None, replace_embeds=None)
    assert hooks._keep_input_embeds_dtype({"other": 1}, runner, without) == {"other": 1}
