"""Whatever crosses a boundary is taken, or is refused as documented: it never does anything else.

The default run is short and always the same; `tests.fuzz.guided` looks further.
"""

import resource
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.target import Target
from tests.fuzz.targets import OPEN_TARGETS, TARGETS

# What one input may cost at most is bounded by its size; these inputs are small.
_MOST_GROWTH_KIB = 256 << 10

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.thorough] if name in OPEN_TARGETS else [])
        for name in TARGETS
    ],
    scope="module",
)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    # The paths of sockets must be short.
    made = TARGETS[request.param](tmp_path_factory.mktemp("f"))
    yield made
    made.close()


def test_valid_input_is_accepted(target: Target) -> None:
    assert target.seeds
    assert all(target.check(seed) for seed in target.seeds)


def test_what_once_went_wrong_is_refused(target: Target) -> None:
    assert {name: target.check(data) for name, data in target.found.items()} == dict.fromkeys(
        target.found, False
    )


def test_bent_input_is_taken_or_refused(target: Target) -> None:
    @settings(max_examples=target.examples, derandomize=True, deadline=None, database=None)
    @given(st.sampled_from(target.seeds), st.integers(0, 2**32 - 1))
    def bent(seed: bytes, choice: int) -> None:
        target.check(target.mutate(seed, Random(choice)))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bent()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MOST_GROWTH_KIB


def test_random_bytes_are_taken_or_refused(target: Target) -> None:
    @settings(max_examples=target.examples // 3, derandomize=True, deadline=None, database=None)
    @given(st.binary(max_size=200))
    def random_bytes(data: bytes) -> None:
        target.check(data)

    random_bytes()
