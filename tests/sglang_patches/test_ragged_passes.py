"""Verify passes of chains that differ in length, as graphs on a GPU take them."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import triton_backend
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _DflashDraftSampler

from adaspec.chains import ChainRows
from adaspec.errors import AdaSpecError
from sglang_patches.worker import ragged_triton
from sglang_patches.worker.draft import BlockWindow
from sglang_patches.worker.draft_sampler import ConfidentDraftSampler
from sglang_patches.worker.graphs import PackedChains, RaggedGraphs
from sglang_patches.worker.verify import kv_places, pack_chains

BLOCK = 4


class Translator:
    """A pool whose slots are as the scheduler names them."""

    def space(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(key=0, write=None)

    def plan(self, **parts: object) -> KVLocPlan:
        return KVLocPlan(source=self, **parts)  # type: ignore[arg-type]


def window(batch: int) -> BlockWindow:
    cells = torch.arange(batch * BLOCK).view(batch, BLOCK)
    plan = Translator().plan(
        req_pool_indices=torch.arange(batch),
        seq_lens=torch.zeros(batch),
        seq_lens_cpu=None,
        write_virtual=(200 + cells).reshape(-1),
    )
    return BlockWindow(cells, 100 + cells, 200 + cells, plan, torch.zeros(batch))


def worker(*tiers: int, ragged: bool = True, requests: int = 4) -> SimpleNamespace:
    runner = SimpleNamespace(kv_index_translator=Translator())
    graphs = RaggedGraphs(BLOCK, tiers, requests)
    return SimpleNamespace(is_ragged=ragged, graphs=graphs, model_runner=runner)


def written(packed: PackedChains, rows: ChainRows) -> list[int]:
    plan, columns = kv_places(window(rows.batch), packed, rows)
    ids = plan.virtual_write_ids(cols=columns)
    assert ids is not None
    return list(ids.tolist())


def test_chains_are_padded_to_the_rows_of_a_graph() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rows = ChainRows.ragged(torch.tensor([3, 1]), 4, BLOCK)
    packed = pack_chains(worker(6), window(2), tokens, rows)
    assert packed.tokens.tolist() == [1, 2, 3, 5, 1, 1]
    assert packed.positions.tolist() == [100, 101, 102, 104, 100, 100]
    assert written(packed, rows) == [200, 201, 202, 204, 0, 0]  # padding goes to the sink
    layout = packed.layout
    assert layout is not None
    assert layout.graph_num_tokens == 6
    # For the slots of the graph, so that SGLang need not pad it again before each replay.
    assert (layout.bs, layout.cap) == (4, BLOCK)
    assert layout.verify_lens.tolist() == [3, 1, 1, 1]
    assert layout.qo_indptr_device.tolist() == [0, 3, 4, 5, 6]
    assert layout.qo_indptr_device.dtype == torch.int32


def test_a_pass_without_a_graph_is_not_padded() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rows = ChainRows.ragged(torch.tensor([3, 1]), 4, BLOCK)
    packed = pack_chains(worker(6, requests=1), window(2), tokens, rows)
    assert packed.tokens.tolist() == [1, 2, 3, 5]
    assert packed.layout is not None
    assert packed.layout.verify_lens.tolist() == [3, 1]
    assert packed.layout.qo_indptr_device.tolist() == [0, 3, 4]


def test_a_uniform_step_has_a_layout_only_where_graphs_are_ragged() -> None:
    tokens, rows = torch.tensor([[1], [5]]), ChainRows.uniform(2, 1, torch.device("cpu"))
    stock = pack_chains(worker(4, ragged=False), window(2), tokens, rows)
    assert stock.layout is None
    assert written(stock, rows) == [200, 204]
    packed = pack_chains(worker(4), window(2), tokens, rows)
    assert packed.tokens.tolist() == [1, 5, 1, 1]
    assert packed.positions.tolist() == [100, 104, 100, 100]
    assert packed.layout is not None
    assert packed.layout.verify_lens.tolist() == [1, 1, 1, 1]
    assert written(packed, rows) == [200, 204, 0, 0]


def test_equal_chains_that_fill_a_graph_are_taken_as_they_lie() -> None:
    tokens = torch.arange(8).view(2, BLOCK)
    rows = ChainRows.uniform(2, BLOCK, torch.device("cpu"))
    packed = pack_chains(worker(8), window(2), tokens, rows)
    assert packed.slots is None
    assert packed.layout is not None
    assert packed.tokens.tolist() == list(range(8))
    assert packed.positions.tolist() == list(range(100, 108))
    assert written(packed, rows) == list(range(200, 208))


def test_uniform_layouts_are_made_once() -> None:
    graphs = RaggedGraphs(BLOCK, (4, 8), 4)
    tokens, positions = torch.tensor([[1], [5]]), torch.arange(2 * BLOCK).view(2, BLOCK)
    rows = ChainRows.uniform(2, 1, torch.device("cpu"))
    once, again = (graphs.pack(rows, tokens, positions, positions) for _ in range(2))
    assert once.layout is again.layout
    # A step without drafts has a window of one column.
    narrow = graphs.pack(rows, tokens, positions[:, :1], positions[:, :1])
    assert narrow.positions.tolist() == [0, BLOCK, 0, 0]


@pytest.mark.parametrize(
    ("batch", "total", "expected"), [(2, 5, 8), (2, 8, 8), (2, 17, 17), (5, 5, 5)]
)
def test_a_pass_takes_the_smallest_graph_that_holds_it(
    batch: int, total: int, expected: int
) -> None:
    assert RaggedGraphs(BLOCK, (4, 8, 16), 4).rows(batch, total) == expected


def test_log_probabilities_are_those_of_the_drafted_tokens() -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(50, 8), torch.randn(3 * BLOCK, 8)
    stock = _DflashDraftSampler(
        weight=weight, block_size=BLOCK, num_org=48, org_vocab_start=0, max_bs=5
    )
    stock(hidden)
    tokens = stock.out[:9].clone()
    ours = ConfidentDraftSampler(stock)
    stock.out.zero_()
    ours(hidden)
    assert ours.out[:9].tolist() == tokens.tolist()
    rows = hidden.view(3, BLOCK, 8)[:, 1:].reshape(-1, 8)
    expected = (rows.double() @ weight[:48].double().T).log_softmax(-1).gather(1, tokens[:, None])
    torch.testing.assert_close(ours.log_probs[:9].double(), expected[:, 0], atol=1e-5, rtol=0)


class _Backend(triton_backend.TritonAttnBackend):
    def __init__(self) -> None:
        pass


def test_only_stock_triton_attention_is_made_ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ragged_triton.MODE_VARIABLE, raising=False)
    runner = SimpleNamespace(attn_backend=_Backend())
    with pytest.raises(AdaSpecError, match="--attention-backend triton"):
        ragged_triton.allow_ragged_passes(runner)  # type: ignore[arg-type]
    runner.attn_backend.__class__ = triton_backend.TritonAttnBackend
    monkeypatch.setenv(ragged_triton.MODE_VARIABLE, "static")
    with pytest.raises(AdaSpecError, match="static"):
        ragged_triton.allow_ragged_passes(runner)  # type: ignore[arg-type]
    monkeypatch.delenv(ragged_triton.MODE_VARIABLE)
    ragged_triton.allow_ragged_passes(runner)  # type: ignore[arg-type]
    assert runner.attn_backend.supports_ragged_verify_graph
    assert resolve_dflash_verify_mask_policy(runner.attn_backend)[1] is False
    assert envs.SGLANG_RAGGED_VERIFY_MODE.get() == "compact"


def test_upstream_refreshes_the_boundaries_of_a_captured_layout() -> None:
    fields = {field.name for field in dataclasses.fields(triton_backend.ForwardMetadata)}
    assert "qo_indptr" in fields
    stock = triton_backend.TritonAttnBackend
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        ours = inspect.signature(getattr(ragged_triton.TritonAttnBackend, name))
        assert list(ours.parameters) == list(inspect.signature(getattr(stock, name)).parameters)
    staged = inspect.getsource(DecodeCudaGraphRunner._stage_ragged_verify_layout)
    assert "cap_layout.qo_indptr_device.copy_(live.qo_indptr_device)" in staged
    assert not stock.supports_ragged_verify_graph
    assert hasattr(DFlashWorkerV2, "_maybe_build_draft_sampler")
