"""The attention backend against a naive float64 reference, for every forward mode."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from adaspec.errors import AdaSpecError
from sglang_patches.cpu.attention import TorchAttentionBackend
from sglang_patches.cpu.spans import plan

HEAD_DIM, V_HEAD_DIM, SLOTS, CONTEXT = 8, 6, 400, 64
DRAFT_TOKENS = 4


class Pool:
    """One layer of KV, written like SGLang's pool."""

    def __init__(self, kv_heads: int, dtype: torch.dtype) -> None:
        self.keys = torch.randn(SLOTS, kv_heads, HEAD_DIM).to(dtype)
        self.values = torch.randn(SLOTS, kv_heads, V_HEAD_DIM).to(dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[location.loc] = k
        self.values[location.loc] = v


def make_layer(q_heads: int = 6, kv_heads: int = 2, **changes: Any) -> SimpleNamespace:
    fields = {
        "layer_id": 0,
        "tp_q_head_num": q_heads,
        "tp_k_head_num": kv_heads,
        "qk_head_dim": HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "scaling": 0.3,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "is_cross_attention": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def make_batch(
    mode: ForwardMode, q_lens: list[int], kv_lens: list[int], layout: Any = None
) -> SimpleNamespace:
    verify = mode == ForwardMode.TARGET_VERIFY
    # In TARGET_VERIFY seq_lens is the committed prefix, without the tokens under verification.
    seq_lens = [kv - q for kv, q in zip(kv_lens, q_lens, strict=True)] if verify else kv_lens
    return SimpleNamespace(
        forward_mode=mode,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        extend_seq_lens=torch.tensor(q_lens, dtype=torch.int32),
        req_pool_indices=torch.arange(len(q_lens)).flip(0) + 1,
        spec_info=SimpleNamespace(draft_token_num=DRAFT_TOKENS, ragged_verify_layout=layout),
        out_cache_loc=None,
    )


def make_table(batch: SimpleNamespace, kv_lens: list[int], *, consecutive: bool) -> torch.Tensor:
    slots = torch.arange(SLOTS - 1) + 1
    if not consecutive:
        slots = slots[torch.randperm(SLOTS - 1)]
    table = torch.full((len(kv_lens) + 2, CONTEXT), SLOTS - 1, dtype=torch.int32)
    cursor = 0
    for row, kv_len in zip(batch.req_pool_indices.tolist(), kv_lens, strict=True):
        table[row, :kv_len] = slots[cursor : cursor + kv_len].int()
        cursor += kv_len
    return table


def reference(
    q: torch.Tensor,  # [rows, q_heads, head_dim]
    pool: Pool,
    table: torch.Tensor,
    batch: SimpleNamespace,
    q_lens: list[int],
    kv_lens: list[int],
    layer: SimpleNamespace,
) -> torch.Tensor:
    out = torch.zeros(*q.shape[:2], V_HEAD_DIM, dtype=torch.float64)
    share = layer.tp_q_head_num // layer.tp_k_head_num
    row = 0
    for request, q_len, kv_len in zip(batch.req_pool_indices, q_lens, kv_lens, strict=True):
        slots = table[request, :kv_len].long()
        for i in range(q_len):
            position = kv_len - q_len + i
            first, last = 0, kv_len - 1
            if layer.attn_type != AttentionType.ENCODER_ONLY:
                last = position
                if layer.sliding_window_size >= 0:
                    first = max(0, position - layer.sliding_window_size)
            seen = slots[first : last + 1]
            for head in range(layer.tp_q_head_num):
                keys = pool.keys[seen, head // share].double()
                weights = (keys @ q[row, head].double() * layer.scaling).softmax(0)
                out[row, head] = weights @ pool.values[seen, head // share].double()
            row += 1
    return out


def check(
    mode: ForwardMode,
    q_lens: list[int],
    kv_lens: list[int],
    layer: SimpleNamespace,
    *,
    dtype: torch.dtype = torch.float32,
    layout: Any = None,
    padding: int = 0,
    consecutive: bool = False,
) -> None:
    torch.manual_seed(0)
    pool = Pool(layer.tp_k_head_num, dtype)
    batch = make_batch(mode, q_lens, kv_lens, layout)
    table = make_table(batch, kv_lens, consecutive=consecutive)
    rows = sum(q_lens)
    written = [
        table[request, kv_len - q_len : kv_len]
        for request, q_len, kv_len in zip(batch.req_pool_indices, q_lens, kv_lens, strict=True)
    ]
    # Padding rows of a verify bucket write to slot 0, which no request reads.
    batch.out_cache_loc = torch.cat([*written, torch.zeros(padding)]).long()
    q = torch.randn(rows + padding, layer.tp_q_head_num * HEAD_DIM).to(dtype)
    k = torch.randn(rows + padding, layer.tp_k_head_num, HEAD_DIM).to(dtype)
    v = torch.randn(rows + padding, layer.tp_k_head_num, V_HEAD_DIM).to(dtype)

    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
    )
    backend = TorchAttentionBackend(runner)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)

    assert torch.equal(pool.keys[batch.out_cache_loc[:rows]], k[:rows])
    heads = q.view(rows + padding, layer.tp_q_head_num, HEAD_DIM)
    expected = reference(heads, pool, table, batch, q_lens, kv_lens, layer)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.view_as(expected).double(), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("kv_lens", [[1], [17], [3, 40, 9, 41, 40]])
def test_decode(heads: tuple[int, int], kv_lens: list[int], consecutive: bool) -> None:
    layer = make_layer(*heads)
    check(ForwardMode.DECODE, [1] * len(kv_lens), kv_lens, layer, consecutive=consecutive)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        pytest.param([5], [5], id="no prefix"),
        pytest.param([7, 1, 7, 12], [30, 20, 7, 12], id="prefixes and lengths mixed"),
        pytest.param([4, 4, 4], [4, 9, 60], id="equal lengths, padded keys"),
    ],
)
def test_prefill(mode: ForwardMode, q_lens: list[int], kv_lens: list[int]) -> None:
    check(mode, q_lens, kv_lens, make_layer())


@pytest.mark.parametrize("kv_lens", [[12], [12, 30, 5, 31]])
def test_verify_sees_the_chain_up_to_itself(kv_lens: list[int]) -> None:
    check(ForwardMode.TARGET_VERIFY, [DRAFT_TOKENS] * len(kv_lens), kv_lens, make_layer())


@pytest.mark.parametrize("kv_lens", [[12], [12, 30, 5, 31]])
def test_draft_block_is_bidirectional(kv_lens: list[int]) -> None:
    layer = make_layer(attn_type=AttentionType.ENCODER_ONLY)
    check(ForwardMode.TARGET_VERIFY, [DRAFT_TOKENS] * len(kv_lens), kv_lens, layer)


@pytest.mark.parametrize("padding", [0, 3])
def test_ragged_verify_lengths(padding: int) -> None:
    q_lens = [3, 1, 4, 1, 3]
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=q_lens, device=torch.device("cpu"), grid=[sum(q_lens) + padding]
    )
    kv_lens = [20, 9, 50, 33, 21]
    check(ForwardMode.TARGET_VERIFY, q_lens, kv_lens, make_layer(), layout=layout, padding=padding)


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize(
    ("mode", "q_lens"), [(ForwardMode.DECODE, [1, 1]), (ForwardMode.EXTEND, [6, 2])]
)
def test_sliding_window(mode: ForwardMode, q_lens: list[int], window: int) -> None:
    check(mode, q_lens, [25, 8], make_layer(sliding_window_size=window))


@pytest.mark.parametrize(
    ("mode", "q_lens"),
    [(ForwardMode.DECODE, [1, 1]), (ForwardMode.TARGET_VERIFY, [DRAFT_TOKENS] * 2)],
)
def test_bfloat16(mode: ForwardMode, q_lens: list[int]) -> None:
    check(mode, q_lens, [25, 14], make_layer(), dtype=torch.bfloat16)


def test_idle_batch_has_no_rows() -> None:
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, CONTEXT, dtype=torch.int32)),
        token_to_kv_pool=Pool(2, torch.float32),
    )
    backend = TorchAttentionBackend(runner)
    batch = make_batch(ForwardMode.IDLE, [], [])
    backend.init_forward_metadata(batch)
    out = backend.forward(torch.zeros(0, 6 * HEAD_DIM), None, None, make_layer(), batch)
    assert out.shape == (0, 6 * V_HEAD_DIM)


@pytest.mark.parametrize("need", [{"logit_cap": 30.0}, {"is_cross_attention": True}])
def test_refuses_what_it_would_compute_wrongly(need: dict[str, Any]) -> None:
    with pytest.raises(AdaSpecError, match="CPU platform has no"):
        check(ForwardMode.DECODE, [1], [5], make_layer(**need))


def test_requests_of_similar_length_share_a_call_and_padding_stays_small() -> None:
    kv_lens = [100, 700, 101, 110, 1000, 120]
    table = torch.arange(8 * 1024, dtype=torch.int32).view(8, 1024)
    groups = plan(torch.arange(6), table, [1] * 6, kv_lens)
    assert sorted(sorted(group.kv_lens) for group in groups) == [
        [100, 101, 110, 120],
        [700],
        [1000],
    ]


def test_stale_slots_behind_a_short_request_are_never_read() -> None:
    table = torch.tensor([[1, 2, 999_999], [3, 4, 5]], dtype=torch.int32)
    (group,) = plan(torch.tensor([0, 1]), table, [1, 1], [2, 3])
    assert isinstance(group.slots, torch.Tensor)
    assert group.slots.tolist() == [1, 2, 0, 3, 4, 5]
