import torch
from hypothesis import given
from hypothesis import strategies as st

from online.prefix_store import PrefixStore

WIDTH = 3


def taps_of(tokens: list[int]) -> torch.Tensor:
    """Taps that depend on the whole prefix, as a target's do."""
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)
    return torch.stack([sums, sums * 2, torch.arange(len(tokens)).float()], dim=1)


@given(
    sequences=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=6
    ),
    query=st.lists(st.integers(0, 1), min_size=1, max_size=70),
)
def test_a_lookup_finds_exactly_what_begins_an_inserted_sequence(
    sequences: list[list[int]], query: list[int]
) -> None:
    store = PrefixStore(1 << 20)
    for sequence in sequences:
        store.insert(sequence, taps_of(sequence))
    found = store.lookup(query)
    if any(s[: len(query)] == query for s in sequences):
        assert found is not None
        assert torch.equal(found, taps_of(query))
    else:
        assert found is None


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    page = 16 * WIDTH * 4
    store = PrefixStore(4 * page)
    system = list(range(32))
    store.insert(system, taps_of(system))
    for turn in range(20):
        other = [100 + turn] * 16
        store.insert(other, taps_of(other))
        assert store.lookup(system) is not None
        assert store.nbytes <= 4 * page
    assert store.lookup([100] * 16) is None
    assert store.lookup([119] * 16) is not None


def test_pages_are_copies() -> None:
    store = PrefixStore(1 << 20)
    tokens = list(range(16))
    taps = taps_of(tokens)
    store.insert(tokens, taps)
    taps.zero_()
    found = store.lookup(tokens)
    assert found is not None
    assert torch.equal(found, taps_of(tokens))
