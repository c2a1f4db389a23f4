"""Attention over SGLang's paged KV pool with ``scaled_dot_product_attention``.

The stock ``torch_native`` backend reads ``extend_prefix_lens``, which a TARGET_VERIFY batch does
not carry, pads every query to its KV length and gathers keys request by request in each layer.
This one plans the spans once per forward pass, and covers prefill, decode, target verification
with uniform or ragged verify lengths, and the bidirectional attention of a draft block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout
from torch.nn.functional import scaled_dot_product_attention

from adaspec.errors import AdaSpecError
from sglang_patches.cpu.spans import SpanGroup, plan


class TorchAttentionBackend(AttentionBackend):
    """Attention backend of the CPU platform (``sglang.srt.layers.attention.base_attn_backend``)."""

    def __init__(self, runner: Any) -> None:
        """Bind to the request table and KV pool of ``runner``, a ``ModelRunner``."""
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.forward_metadata: list[SpanGroup] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the spans of a batch; every layer of the pass reads the plan."""
        q_lens, kv_lens = _span_lengths(forward_batch)
        self.forward_metadata = plan(
            forward_batch.req_pool_indices, self.req_to_token_pool.req_to_token, q_lens, kv_lens
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer over the planned spans.

        Args:
            q: Queries, ``[rows, q_heads * head_dim]``; rows behind the plan are padding.
            k: New keys, ``[rows, kv_heads, head_dim]``, or None when a layer shares another's.
            v: New values, ``[rows, kv_heads, v_head_dim]``, or None with ``k``.
            layer: The ``RadixAttention`` module.
            forward_batch: The ``ForwardBatch`` that was planned.
            save_kv_cache: Whether to write ``k`` and ``v`` to ``out_cache_loc`` first.

        Returns:
            ``[rows, q_heads * v_head_dim]``, zero in padding rows.
        """
        _require_supported(layer)
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)  # [slots, kv_heads, head_dim]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)

        kv_heads = layer.tp_k_head_num
        q = q.reshape(-1, kv_heads, layer.tp_q_head_num // kv_heads, layer.qk_head_dim)
        out = q.new_zeros(*q.shape[:-1], layer.v_head_dim)  # [rows, kv_heads, group, v_head_dim]
        for group in self.forward_metadata:
            out[group.rows] = _attend(group, q[group.rows], keys, values, layer)
        return out.view(q.shape[0], -1)

    forward_extend = forward_decode

    def support_triton(self) -> bool:
        """No Triton kernel runs on the CPU."""
        return False


def _span_lengths(forward_batch: Any) -> tuple[Sequence[int], Sequence[int]]:
    """(queries, keys) of each request, for every forward mode."""
    mode = forward_batch.forward_mode
    seq_lens: list[int] = forward_batch.seq_lens.tolist()
    if mode.is_idle():
        return [], []
    if mode.is_decode():
        return [1] * len(seq_lens), seq_lens
    if mode.is_target_verify():
        # Here seq_lens counts the committed prefix; the verified tokens come on top of it.
        layout = resolve_ragged_verify_layout(forward_batch)
        if layout is None:
            q_lens = [int(forward_batch.spec_info.draft_token_num)] * len(seq_lens)
        else:
            q_lens = layout.verify_lens.tolist()[: len(seq_lens)]
        return q_lens, [s + n for s, n in zip(seq_lens, q_lens, strict=True)]
    return forward_batch.extend_seq_lens.tolist(), seq_lens


def _attend(
    group: SpanGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any
) -> torch.Tensor:
    """Attention of one group.

    Args:
        group: The requests.
        q: Their queries, ``[requests * q_len, kv_heads, group, head_dim]``.
        keys: Key pool of the layer, ``[slots, kv_heads, head_dim]``.
        values: Value pool of the layer, ``[slots, kv_heads, v_head_dim]``.
        layer: The ``RadixAttention`` module.

    Returns:
        ``[requests * q_len, kv_heads, group, v_head_dim]``.
    """
    rows, kv_heads, heads_per_kv, head_dim = q.shape
    requests, q_len = rows // group.q_len, group.q_len
    # [requests, kv_heads, kv_len, head_dim]
    k = _read(keys, group, q.dtype).transpose(1, 2)
    v = _read(values, group, q.dtype).transpose(1, 2)
    # The query heads that share a key head become extra queries of it: keys are read once.
    q = q.view(requests, q_len, kv_heads, heads_per_kv, head_dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(requests, kv_heads, q_len * heads_per_kv, head_dim)
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    mask = group.mask(
        causal=causal, window=window if causal else -1, heads=heads_per_kv, dtype=q.dtype
    )
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
    out = out.view(requests, kv_heads, q_len, heads_per_kv, -1).transpose(1, 2)
    return out.reshape(rows, kv_heads, heads_per_kv, -1)


def _read(pool: torch.Tensor, group: SpanGroup, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of a group, ``[requests, kv_len, kv_heads, head_dim]``."""
    slots = group.slots
    rows = pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)
    return rows.view(-1, group.kv_len, *pool.shape[1:]).to(dtype)


def _require_supported(layer: Any) -> None:
    if layer.logit_cap or layer.is_cross_attention:
        what = "cross attention" if layer.is_cross_attention else "attention logit capping"
        raise AdaSpecError(
            f"The CPU platform has no {what}, which layer {layer.layer_id} of this model needs; "
            "serve the model on a GPU."
        )
