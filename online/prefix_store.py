"""Taps by content: what the server's prefix cache leaves out of a request's prefill.

On a cache hit the target does not read the cached tokens again, so their taps are not sent again.
They were sent with the request that filled the cache, and they depend on nothing but the tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE_TOKENS = 16


class _Page:
    """Taps of up to 16 tokens behind one exact prefix; only a full page is continued."""

    __slots__ = ("children", "key", "parent", "taps")

    def __init__(self, parent: "_Page | None", key: tuple[int, ...], taps: Tensor) -> None:
        self.parent = parent
        self.key = key
        self.taps = taps  # [len(key), taps * hidden]
        self.children: dict[tuple[int, ...], _Page] = {}


class PrefixStore:
    """A trie of tap pages with a memory cap; the longest unused pages go first.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._root = _Page(None, (), torch.empty(0))
        self._recency: OrderedDict[_Page, None] = OrderedDict()
        self.nbytes = 0

    def insert(self, tokens: Sequence[int], taps: Tensor) -> None:
        """Remember the taps of a sequence from its start.

        Args:
            tokens: at least as many as rows.
            taps: ``[rows, taps * hidden]``; rows that are new are copied.
        """
        page, path, rows = self._root, [], taps.shape[0]
        for start in range(0, rows, _PAGE_TOKENS):
            end = min(start + _PAGE_TOKENS, rows)
            key = tuple(tokens[start:end])
            child = _child_that_covers(page, key)
            if child is None:
                child = self._add(page, key, taps[start:end].clone())
            path.append(child)
            page = child
        self._touch(path)
        while self.nbytes > self._capacity:
            self._evict()

    def lookup(self, tokens: Sequence[int]) -> Tensor | None:
        """Taps ``[len(tokens), taps * hidden]`` of a prefix, or None if any are missing."""
        page, path, parts = self._root, [], []
        whole = len(tokens) - len(tokens) % _PAGE_TOKENS
        for start in range(0, whole, _PAGE_TOKENS):
            child = page.children.get(tuple(tokens[start : start + _PAGE_TOKENS]))
            if child is None:
                return None
            path.append(child)
            parts.append(child.taps)
            page = child
        rest = tuple(tokens[whole:])
        if rest:
            last = _child_that_covers(page, rest)
            if last is None:
                return None
            path.append(last)
            parts.append(last.taps[: len(rest)])
        self._touch(path)
        return torch.cat(parts) if parts else None

    def _add(self, page: _Page, key: tuple[int, ...], taps: Tensor) -> _Page:
        for shorter in [k for k in page.children if k == key[: len(k)]]:
            self._remove(page.children[shorter])
        child = page.children[key] = _Page(page, key, taps)
        self.nbytes += taps.nbytes
        return child

    def _touch(self, path: Sequence[_Page]) -> None:
        # Leaves first, so that a page is always more recent than those behind it.
        for page in reversed(path):
            self._recency[page] = None
            self._recency.move_to_end(page)

    def _evict(self) -> None:
        self._remove(next(iter(self._recency)))

    def _remove(self, page: _Page) -> None:
        assert page.parent is not None
        del self._recency[page]
        del page.parent.children[page.key]
        self.nbytes -= page.taps.nbytes


def _child_that_covers(page: _Page, key: tuple[int, ...]) -> _Page | None:
    """A page behind ``page`` that begins with these tokens."""
    exact = page.children.get(key)
    if exact is not None or len(key) == _PAGE_TOKENS:
        return exact
    return next((c for k, c in page.children.items() if k[: len(key)] == key), None)
