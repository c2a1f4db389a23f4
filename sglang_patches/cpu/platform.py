"""The platform class SGLang asks: devices, defaults, kernels and speculative support."""

import gc
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_patches.cpu import defaults, hooks, resources
from sglang_patches.cpu.kernels import extend_cache_locs
from sglang_patches.cpu.packed_linear import pack_linear_layers
from sglang_patches.version import require_sglang_version

logger = logging.getLogger(__name__)

SPECULATIVE_ALGORITHMS = ("ADASPEC", "DFLASH")


class AdaSpecCpuPlatform(SRTPlatform):
    """Plain PyTorch on the host CPU; every method answers a seam of ``SRTPlatform``."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    # Device and memory

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory of the host or of the container around the server."""
        return resources.total_memory()

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes that are not available, so that total minus usage is what can be allocated."""
        return float(resources.total_memory() - resources.available_memory())

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(available, total) bytes."""
        return resources.available_memory(), resources.total_memory()

    def get_device(self, device_id: int | None = 0) -> str:
        """Device string; upstream splits an index off it, so there is none."""
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """Nothing to select: all ranks share the one CPU device."""

    def get_device_name(self, device_id: int = 0) -> str:
        """Name shown in logs."""
        return "cpu"

    def empty_cache(self) -> None:
        """Called when the server is idle or flushes its cache."""
        gc.collect()

    # Configuration

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in the arguments the user left open, in the launching process."""
        require_sglang_version()
        hooks.verify_installed()
        defaults.apply(server_args)

    def get_default_attention_backend(self) -> str:
        """The one attention backend of this platform."""
        return defaults.ATTENTION_BACKEND

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Backend of ``torch.compile``; eager, since nothing is compiled."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Fused operators run their ``forward_native``."""
        return "native"

    # Speculative decoding

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """DFLASH-family algorithms only: the others need tree kernels."""
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The one attention backend of this platform."""
        return defaults.ATTENTION_BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Whether the drafter may run on ``backend``."""
        return backend == defaults.ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """PyTorch version of the Triton kernel ``assign_extend_cache_locs``."""
        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """The multi-head pool without its Triton copy kernel; None for the other kinds."""
        if kind != "mha":
            return None
        from sglang_patches.cpu.kv_pool import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool

    # Lifecycle in each server process

    def init_backend(self) -> None:
        """Choose the thread count and register the attention backend.

        Called while ``sglang.srt.model_executor.model_runner`` is imported, which in the scheduler
        process is before the plugins run: the hooks are checked when the backend is made.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(resources.default_threads(resources.usable_cores()))

        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(defaults.ATTENTION_BACKEND)(_create_attention_backend)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack the weights for few-row products, and clear the Triton path of a DFLASH drafter.

        ``sglang.srt.models.dflash.DFlashAttention`` launches the Triton kernel
        ``table_qk_norm_rope_`` for bfloat16 while its flag is set; without, it uses its modules.
        """
        extra_bytes = pack_linear_layers(model)
        logger.info("CPU platform: %.0f MB of packed weights.", extra_bytes / 1e6)
        for module in model.modules():
            if hasattr(module, "use_table_qk_norm_rope"):
                module.use_table_qk_norm_rope = False


def _create_attention_backend(runner: Any) -> Any:
    """Factory for SGLang's attention registry; refuses to serve when a hook is not in effect."""
    from sglang_patches.cpu.attention import TorchAttentionBackend

    hooks.verify_installed()
    logger.info("CPU platform: %d thread(s) per forward pass.", torch.get_num_threads())
    return TorchAttentionBackend(runner)
