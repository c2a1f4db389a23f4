"""What a monitor has seen, thinned so that hours fit: the lines of the web page's plots."""

import msgspec

from adaspec.monitor.follow import Report

_MOST_POINTS = 2048


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One report on the plots; None leaves a gap.

    Attributes:
        time: Unix time, seconds.
        acceptance: by block position from 1; empty for a gap.
        verify_length: mean over the passes.
        sent, dropped: feedback records since the server's start.
    """

    time: float
    version: int | None = None
    committed_per_pass: float | None = None
    base: float | None = None
    tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    acceptance: list[float] = []
    verify_length: float | None = None
    sent: int | None = None
    dropped: int | None = None
    learning_seconds: float | None = None


def point(report: Report) -> Point:
    """A report's place on the plots: a gap if the server did not answer."""
    known = report.figures
    if known is None or report.problem is not None:
        return Point(time=report.time)
    lengths = known.verify_lengths
    return Point(
        time=report.time,
        version=known.live_version,
        committed_per_pass=known.committed_per_pass,
        base=known.base,
        tokens_per_s=known.tokens_per_s,
        plain_tokens_per_s=known.plain_tokens_per_s,
        acceptance=known.acceptance,
        verify_length=sum(n * share for n, share in lengths.items()) if lengths else None,
        sent=known.sent,
        dropped=sum(known.dropped.values()),
        learning_seconds=known.learner.get("learning_seconds"),
    )


class History:
    """Points in the order of time.

    When there are too many, every second one of the older half goes: what is long past is kept
    coarsely.

    Args:
        most: points that are kept.
    """

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self._most = most
        self._points: list[Point] = []

    def add(self, new: Point) -> None:
        """The newest point."""
        self._points.append(new)
        if len(self._points) > self._most:
            half = self._most // 2
            self._points = self._points[:half:2] + self._points[half:]

    def after(self, time: float) -> list[Point]:
        """Points later than this."""
        return [p for p in self._points if p.time > time]
