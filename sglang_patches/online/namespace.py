"""The prefix cache by drafter context: K/V of one set of context weights are not read by another.

Cached prefixes hold the drafter's context K/V beside the target's. After a swap that changes the
weights these are made of (mode ``full``), a reused prefix would be right for the target and
misleading for the drafter. New requests therefore look in a name space of their own; running ones
go on with the context they have, which costs acceptance only. Going back to an earlier context
finds its cache again.

A small share of requests finds no prefix at all. Their whole prompt is computed and its features
are sent, so that a learner that was restarted, or has lost a record, gets to know the prefixes that
later requests share; without its features a request cannot be learned from.
"""

from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from adaspec.feedback import in_share

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

HOOKED = "sglang.srt.managers.scheduler.Scheduler._maybe_namespace_elastic_radix_cache"

_current: str | None = None
_refresh_share = 0.0


def use_context(context_sha256: str | None) -> None:
    """Name the context that new requests of this process belong to; None for the first one."""
    global _current
    _current = None if context_sha256 is None else f"adaspec-context={context_sha256[:16]}"


def refresh_prefixes(share: float) -> None:
    """Let this share of new requests compute their whole prompt; the same ones on every rank."""
    global _refresh_share
    _refresh_share = share


def install() -> None:
    """Hook ``Scheduler._maybe_namespace_elastic_radix_cache``, called for every new request.

    Reason: it is where upstream itself gives requests a name space of the prefix cache
    (``Req.extra_key``), after the request is made and before its prefix is looked up, and there is
    no seam for others to do so.
    """
    HookRegistry.register(HOOKED, _name_request, HookType.AFTER)


def _name_request(result: Any, scheduler: Any, req: "Req") -> None:
    names = [req.extra_key or None, _current]
    if _refresh_share and in_share(req.rid, _refresh_share, "prefix-refresh"):
        names.append(f"adaspec-refresh={req.rid}")
    req.extra_key = "|".join(filter(None, names)) or req.extra_key
