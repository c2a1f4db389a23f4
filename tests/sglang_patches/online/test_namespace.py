"""Requests are named after the drafter's context, by a hook on upstream's own naming."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_patches.online import namespace


@pytest.fixture(autouse=True)
def first_context() -> Iterator[None]:
    yield
    namespace.use_context(None)
    namespace.refresh_prefixes(0.0)


def named(extra_key: str | None, rid: str = "r") -> str | None:
    req = SimpleNamespace(extra_key=extra_key, rid=rid)
    namespace._name_request(None, None, req)
    return req.extra_key


def test_the_first_context_has_no_name() -> None:
    assert named(None) is None
    assert named("tenant") == "tenant"


def test_contexts_are_kept_apart_and_found_again() -> None:
    namespace.use_context("a" * 64)
    first = named("tenant")
    namespace.use_context("b" * 64)
    assert named("tenant") not in (first, "tenant")
    namespace.use_context("a" * 64)
    assert named("tenant") == first
    assert named(None) not in (None, first)


def test_a_share_of_requests_has_a_name_of_its_own() -> None:
    namespace.refresh_prefixes(0.1)
    names = [named(None, f"r{i}") for i in range(1000)]
    refreshed = [name for name in names if name is not None]
    assert 60 < len(refreshed) < 140
    assert len(set(refreshed)) == len(refreshed)
    assert names == [named(None, f"r{i}") for i in range(1000)]


def test_the_hooked_method_exists_and_is_called_before_the_prefix_is_looked_up() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    method = namespace.HOOKED.rpartition(".")[2]
    assert list(inspect.signature(getattr(Scheduler, method)).parameters) == ["self", "req"]
    source = inspect.getsource(Scheduler._handle_generate_request)
    assert source.index(method) < source.index("_add_request_to_queue(req)", source.index(method))
