"""What is written to the draft cache, and when."""

import pytest
import torch

from adaspec.chains import ChainRows
from sglang_patches.worker import context as module
from sglang_patches.worker.context import DraftContext
from sglang_patches.worker.graphs import PackedChains, RaggedGraphs

Written = dict[int, tuple[float, int]]  # slot: (feature, position)


class Cache:
    """The draft cache, as far as it can be told from what is appended."""

    def __init__(self) -> None:
        self.slots: Written = {}
        self.writes = 0

    def append(
        self, target_hidden: torch.Tensor, cache_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self.writes += 1
        for row, slot, position in zip(
            target_hidden[:, 0].tolist(), cache_loc.tolist(), positions.tolist(), strict=True
        ):
            self.slots[slot] = (row, position)


FEATURES = torch.arange(8.0)[:, None]  # with padding behind
SLOTS = torch.arange(9).view(3, 3)
COMMIT_LENS = torch.tensor([2, 1, 2], dtype=torch.int32)


def packed(rows: ChainRows, graphs: RaggedGraphs | None = None) -> PackedChains:
    positions = torch.arange(10, 19).view(3, 3)
    return (graphs or RaggedGraphs(3)).pack(rows, SLOTS[:, : rows.width], positions, SLOTS)


def commit(context: DraftContext, rows: ChainRows, graphs: RaggedGraphs | None = None) -> None:
    chains = packed(rows, graphs)
    slots = SLOTS if rows.lengths is None else chains.slots
    assert slots is not None
    context.commit(rows, FEATURES, slots, chains.positions, COMMIT_LENS)


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def context(cache: Cache) -> DraftContext:
    return DraftContext(cache.append, on_host=True)


def keep(context: DraftContext, names: str, step: int) -> None:
    """A plain step; request i of "abc" has slots 100 i and up."""
    owners = torch.tensor(["abc".index(name) for name in names])
    features = torch.cat([owners[:, None] + step / 10, torch.tensor([[9.0]])])  # one row of padding
    positions = torch.full((len(names),), step)
    context.keep(tuple(names), features, owners * 100 + step, positions)


def test_only_committed_rows_of_ragged_chains_are_written(
    context: DraftContext, cache: Cache
) -> None:
    rows = ChainRows.ragged(torch.tensor([3, 1, 2]), 6, 3)
    commit(context, rows)
    assert cache.slots == {0: (0, 10), 1: (1, 11), 3: (3, 13), 6: (4, 16), 7: (5, 17)}


def test_on_a_device_rejected_rows_go_to_their_own_slots(cache: Cache) -> None:
    rows = ChainRows.ragged(torch.tensor([3, 1, 2]), 6, 3)
    context = DraftContext(cache.append, on_host=False)
    commit(context, rows)
    assert cache.slots == {
        0: (0, 10), 1: (1, 11), 2: (2, 12), 3: (3, 13), 6: (4, 16), 7: (5, 17)
    }  # fmt: skip


@pytest.mark.parametrize("graphs", [RaggedGraphs(3), RaggedGraphs(3, (8,), 4)])
def test_equal_chains_are_written_from_their_columns(cache: Cache, graphs: RaggedGraphs) -> None:
    rows = ChainRows.uniform(3, 2, torch.device("cpu"))
    context = DraftContext(cache.append, on_host=True)
    commit(context, rows, graphs)
    assert cache.slots == {0: (0, 10), 1: (1, 11), 3: (2, 13), 6: (4, 16), 7: (5, 17)}


def test_plain_steps_are_written_in_one_go(context: DraftContext, cache: Cache) -> None:
    keep(context, "ab", 1)
    context.before_plain_step(("a", "b"))
    keep(context, "ab", 2)
    assert (cache.slots, context.pending_tokens) == ({}, 4)
    assert context.catch_up() == 4
    assert context.catch_up() == 0
    expected = {1: (0.1, 1), 101: (1.1, 1), 2: (0.2, 2), 102: (1.2, 2)}
    assert cache.slots == {s: (pytest.approx(f), p) for s, (f, p) in expected.items()}
    assert cache.writes == 1


def test_a_request_that_leaves_is_written_before_its_slots_change_hands(
    context: DraftContext, cache: Cache
) -> None:
    keep(context, "ab", 1)
    context.before_plain_step(("b", "c"))
    assert set(cache.slots) == {1, 101}
    keep(context, "bc", 2)
    context.before_plain_step(("b", "c"))
    assert set(cache.slots) == {1, 101}


def test_a_newcomer_alone_writes_nothing(context: DraftContext, cache: Cache) -> None:
    keep(context, "a", 1)
    context.before_plain_step(("a", "b"))
    assert cache.slots == {}


def test_what_waits_is_bounded(
    context: DraftContext, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING_BYTES", 3 * 4 * 2)
    for step in range(20):
        keep(context, "ab", step)
        assert context.pending_tokens <= 6
    assert cache.writes == 5
