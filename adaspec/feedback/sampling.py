"""Deterministic assignment of requests to shares: a request falls the same way everywhere."""

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=1 << 16)
def request_score(request: str, purpose: str) -> float:
    """A number in [0, 1), uniform over request ids and independent between purposes."""
    digest = blake2b(request.encode(), digest_size=8, key=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def in_share(request: str, share: float, purpose: str) -> bool:
    """Whether a request belongs to the ``share`` (0 to 1) of requests set aside for a purpose.

    Growing the share keeps the requests that were in it.
    """
    return request_score(request, purpose) < share
