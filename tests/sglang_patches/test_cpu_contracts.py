"""The upstream symbols the CPU platform builds on still exist and are still called as we assume."""

import importlib
import inspect
from typing import Any

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.platforms.interface import SRTPlatform

from sglang_patches.cpu.attention import TorchAttentionBackend
from sglang_patches.cpu.kernels import (
    assign_req_to_token,
    chain_speculative_sampling,
    extend_cache_locs,
)
from sglang_patches.cpu.platform import AdaSpecCpuPlatform

SIGNATURES = {
    "sglang.srt.arg_groups.choices:add_draft_attention_backend_choices": ["iterable"],
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ["name"],
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup": ["self"],
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache": [
        "self",
        "tgt_loc",
        "src_loc",
    ],
    "sglang.srt.mem_cache.memory_pool:move_kv_cache_native": [
        "k_buffer",
        "v_buffer",
        "tgt_loc",
        "src_loc",
    ],
    "sglang.srt.model_executor.cuda_graph_config:with_phase": ["config", "phase", "changes"],
    "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs": [
        "self",
        "forward_batch",
        "pp_proxy_tensors",
    ],
    "sglang.srt.speculative.ragged_verify:resolve_ragged_verify_layout": ["forward_batch"],
    "sglang.srt.plugins.hook_registry:HookRegistry.register": [
        "target",
        "hook",
        "hook_type",
        "source",
    ],
}

REPLACED = {
    "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func": assign_req_to_token,
    "sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_func": extend_cache_locs,
    "sglang.kernels.ops.speculative.sampling:tree_speculative_sampling_target_only": (
        chain_speculative_sampling
    ),
}

STILL_NEEDED = {
    # The reason for a replacement: when upstream drops it, the replacement goes too.
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation": (
        "batch.seq_lens.record_stream("
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs": (
        "forward_batch.input_embeds.bfloat16()"
    ),
    "sglang.srt.models.dflash:DFlashAttention.forward": "self.use_table_qk_norm_rope",
    "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func": (
        "assign_req_to_token_pool[(batch_size,)]"
    ),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup": "copy",
}

SERVER_ARGUMENTS = [
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "dtype",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "sleep_on_idle",
    "disable_hybrid_swa_memory",
    "cuda_graph_config",
]


def resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found) if callable(found) else found


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize("place", list(SIGNATURES))
def test_signature(place: str) -> None:
    assert parameters(resolve(place)) == SIGNATURES[place]


@pytest.mark.parametrize("place", list(REPLACED))
def test_replacement_takes_what_the_original_takes(place: str) -> None:
    original, ours = inspect.signature(resolve(place)), inspect.signature(REPLACED[place])
    assert list(ours.parameters) == list(original.parameters)


@pytest.mark.parametrize("place", list(STILL_NEEDED))
def test_replacement_is_still_needed(place: str) -> None:
    assert STILL_NEEDED[place] in inspect.getsource(resolve(place))


def overridden(ours: type, base: type) -> list[str]:
    return [
        name
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and not name.startswith("_") and hasattr(base, name)
    ]


@pytest.mark.parametrize("name", overridden(AdaSpecCpuPlatform, SRTPlatform))
def test_platform_seam(name: str) -> None:
    assert parameters(getattr(AdaSpecCpuPlatform, name)) == parameters(getattr(SRTPlatform, name))


def test_every_platform_method_is_a_seam() -> None:
    own = {n for n, v in vars(AdaSpecCpuPlatform).items() if inspect.isfunction(v)}
    assert own == set(overridden(AdaSpecCpuPlatform, SRTPlatform))


@pytest.mark.parametrize("name", overridden(TorchAttentionBackend, AttentionBackend))
def test_attention_backend_seam(name: str) -> None:
    ours = parameters(getattr(TorchAttentionBackend, name))
    assert ours == parameters(getattr(AttentionBackend, name))


@pytest.mark.parametrize("field", SERVER_ARGUMENTS)
def test_server_argument_exists(field: str) -> None:
    from sglang.srt.server_args import ServerArgs

    assert field in parameters(ServerArgs.__init__) or hasattr(ServerArgs, field)


def test_dflash_reads_the_sampling_op_from_its_module() -> None:
    module = importlib.import_module("sglang.srt.speculative.dflash_utils")
    source = inspect.getsource(module)
    assert "_DFLASH_SAMPLING_VERIFY_AVAILABLE = (" in source
    # Called by name, with these arguments: what the replacement relies on.
    call = source[source.index("        tree_speculative_sampling_target_only(") :]
    call = call[: call.index("        )")]
    passed = [line.split("=")[0].strip() for line in call.splitlines()[1:]]
    assert set(passed) <= set(parameters(chain_speculative_sampling))


def test_ragged_layout_carries_verify_lens() -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    assert "verify_lens" in RaggedVerifyLayout.__struct_fields__
