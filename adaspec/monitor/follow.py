"""Follow a server over time: its restarts, its versions, and whether what is known is old."""

import time
from collections import deque
from pathlib import Path

import httpx
import msgspec

from adaspec.decisions import Decision, last_decisions
from adaspec.errors import AdaSpecError
from adaspec.monitor.figures import Figures, figures
from adaspec.monitor.scrape import Scrape, fetch

_COUNTED = ("adaspec_target_passes_total", "adaspec_feedback_records_total")
_MOST_CHANGES = 256
# What to do about each cause of a collapse that a server can name; its log says more.
REMEDIES = {
    "weights": "the drafter's weights in memory are not those that were loaded: restart the server",
    "target weights": "the target's weights have changed since the start: serve a drafter for them",
    "version": "the live version is worse than the base: roll it back",
    "prefix cache": "the drafter's part of the prefix cache does not fit: call /flush_cache",
    "target": "the drafter was trained for another target: serve its own",
    "tokenizer": "the drafter was trained with another tokenizer: give the target's own",
    "template": "the drafter was trained with another chat template: serve with that",
    "taps": "target_layer_ids are not those of the training: restore the drafter's config.json",
    "head": "the target or its output matrix is quantised or rounded otherwise than in training",
    "drafter quantised": "add --speculative-draft-model-quantization unquant",
    "traffic": "the server is as it was, so traffic is other than the drafter knows: let it learn",
    "unknown": "nothing that the server can check explains it",
}


class Change(msgspec.Struct, frozen=True):
    """A version went live, or the server started again."""

    time: float
    version: int
    restarted: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a monitor shows.

    Attributes:
        time: Unix time, seconds.
        stale_s: age of the figures, if the server has not answered since; 0 if it just did.
        problem: why it did not.
        figures: None before the first answer.
        timeline: changes of the live version that the monitor has seen, oldest first.
        warnings: sentences on what someone should look at.
        decisions: the learner's last ones, oldest first; empty without its version store.
    """

    time: float
    url: str
    stale_s: float
    problem: str | None
    figures: Figures | None
    timeline: list[Change]
    warnings: list[str]
    decisions: list[Decision] = []


class Monitor:
    """Turns readings into reports.

    Args:
        url: of the server, to be shown.
        window_s: figures of the moment are over so many seconds.
        store: the learner's version store, if it is on this machine.
    """

    def __init__(self, url: str, window_s: float, store: Path | None = None) -> None:
        self._url = url
        self._store = store
        self._window_s = window_s
        self._readings: deque[Scrape] = deque()
        self._timeline: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self._problem: str | None = None

    def see(self, scrape: Scrape) -> None:
        """The server has answered."""
        self._problem = None
        last = self._readings[-1] if self._readings else None
        restarted = last is not None and any(
            scrape.total(name) < last.total(name) for name in _COUNTED
        )
        if restarted:
            self._readings.clear()
        live = int(scrape.total("adaspec_live_version"))
        if last is None or restarted or live != self._timeline[-1].version:
            self._timeline.append(Change(scrape.time, live, restarted))
        self._readings.append(scrape)
        # One reading at or before the window's start stays, to count from.
        while len(self._readings) > 2 and scrape.time - self._readings[1].time >= self._window_s:
            self._readings.popleft()

    def miss(self, problem: str) -> None:
        """The server has not answered."""
        self._problem = problem

    def report(self, now: float) -> Report:
        """What is known at this time."""
        decisions = last_decisions(self._store) if self._store is not None else []
        if not self._readings:
            return Report(
                time=now, url=self._url, stale_s=0.0, problem=self._problem, figures=None,
                timeline=[], warnings=[], decisions=decisions,
            )  # fmt: skip
        newest = self._readings[-1]
        oldest = self._readings[0] if len(self._readings) > 1 else None
        known = figures(newest, oldest)
        return Report(
            time=now,
            url=self._url,
            stale_s=max(now - newest.time, 0.0) if self._problem else 0.0,
            problem=self._problem,
            figures=known,
            timeline=list(self._timeline),
            warnings=warnings(known),
            decisions=decisions,
        )


def look(monitor: Monitor, client: httpx.Client, url: str) -> Report:
    """Read a server once, and say what is known now."""
    try:
        monitor.see(fetch(client, url))
    except AdaSpecError as error:
        monitor.miss(str(error))
    return monitor.report(time.time())


def warnings(known: Figures) -> list[str]:
    """What in these figures someone should look at."""
    found = []
    if known.collapse is not None:
        remedy = REMEDIES.get(known.collapse, "see the server's log")
        found.append(f"acceptance has collapsed ({known.collapse}): {remedy}.")
    if known.audit_failures:
        found.append(
            f"{known.audit_failures} swaps left weights that are not what they should be: restart "
            "the server."
        )
    if known.refused:
        found.append(f"{known.refused} drafter versions were refused; the server's log says why.")
    lost = sum(known.dropped.values())
    if lost > 0.05 * max(known.sent + lost, 1):
        found.append(
            f"{lost} of {known.sent + lost} feedback records were dropped "
            f"({', '.join(sorted(known.dropped))}); raise tap.bytes_per_second or lower tap.share."
        )
    now, base = known.committed_per_pass, known.base
    if known.live_version != 0 and now is not None and base is not None and now < 0.9 * base:
        found.append(
            f"version {known.live_version} commits {now:.2f} tokens per pass where the base has "
            f"committed {base:.2f}; if traffic is the same, roll back."
        )
    speed, plain = known.tokens_per_s, known.plain_tokens_per_s
    if speed is not None and plain is not None and known.running and speed < 0.8 * plain:
        found.append(
            f"plain decoding would commit about {plain:.0f} tokens/s where {speed:.0f} are "
            'committed; set verify.policy to "goodput".'
        )
    return found
