"""KV pool without the Triton slot-copy kernel."""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose slot moves are index copies.

    Upstream's ``_init_kv_copy_and_warmup`` launches a Triton kernel while the pool is built.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy KV slots ``src_loc`` to ``tgt_loc``, both ``[n]`` integer, in every layer."""
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)
