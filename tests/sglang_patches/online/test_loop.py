"""What the loop makes of steps whose counts arrive late, and whom it lets stay."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from prometheus_client import CollectorRegistry

from adaspec.chains import ChainRows
from adaspec.config import WatchConfig
from sglang_patches.online.loop import OnlineLoop
from sglang_patches.online.metrics import WorkerMetrics
from sglang_patches.online.served import Served, Standing, Swap
from sglang_patches.online.watch import AcceptanceWatch, Outcome

WIDTH = 4
BASE, LIVE = 0, 3


@dataclass
class Swapper:
    """A `VersionSwapper` whose state the test sets."""

    version: int = LIVE
    drafting: int = LIVE
    standing: Standing = "controlled"
    next_swap: Swap | None = None
    drafted: int = 0
    trusted: list[int] = field(default_factory=list)
    rolled_back: list[str] = field(default_factory=list)

    def between_steps(self) -> Swap | None:
        swap, self.next_swap = self.next_swap, None
        if swap is not None:
            self.version = self.drafting = swap.version
        return swap

    def take_refusal(self) -> None: ...

    def count_draft(self) -> None:
        self.drafted += 1

    def trust_live(self) -> None:
        self.trusted.append(self.version)

    def request_roll_back(self, reason: str) -> None:
        self.rolled_back.append(reason)


class Watch(AcceptanceWatch):
    """A watch that notes what it is shown."""

    def __init__(self, standing: Standing = "controlled") -> None:
        super().__init__(WatchConfig(window_tokens=1000), standing)
        self.seen: list[tuple[int, int, bool]] = []

    def observe(self, committed: int, passes: int, control: bool = False) -> Outcome | None:
        self.seen.append((committed, passes, control))
        return super().observe(committed, passes, control)


@pytest.fixture
def swapper() -> Swapper:
    return Swapper()


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def loop(swapper: Swapper, watch: Watch) -> OnlineLoop:
    return OnlineLoop(Served(BASE, "c"), None, swapper, watch, None)


def run(loop: OnlineLoop, requests: int = 2, width: int = WIDTH) -> None:
    """A decode step, whose counts are still on their way."""
    loop.before_step()
    tokens = torch.zeros(requests, width, dtype=torch.int64)
    rows = ChainRows.uniform(requests, width, tokens.device)
    loop.after_verify([None] * requests, None, tokens, rows, None, None)


def count(loop: OnlineLoop, accepted: Sequence[int], width: int = WIDTH) -> None:
    """The counts of a step have reached the host."""
    loop.after_counts(accepted, [width] * len(accepted), drafted=width > 1)


def swap_to(version: int, rolled_back: bool = False) -> Swap:
    return Swap(version, LIVE, rolled_back, "c", False, "test says so")


def test_steps_count_for_the_version_that_drafted_them(
    swapper: Swapper, watch: Watch, loop: OnlineLoop
) -> None:
    run(loop)
    swapper.drafting = BASE  # a control window, before the counts are there
    run(loop)
    count(loop, [0, 3])
    swapper.drafting = LIVE
    run(loop)
    count(loop, [1, 1])
    count(loop, [2, 0])
    assert watch.seen == [(5, 2, False), (4, 2, True), (4, 2, False)]
    assert swapper.drafted == 3


def test_late_steps_of_a_version_that_has_gone_count_neither_for_nor_against_the_next(
    swapper: Swapper, watch: Watch, loop: OnlineLoop
) -> None:
    run(loop)
    swapper.next_swap = swap_to(4)
    run(loop)
    count(loop, [0, 0])
    assert watch.seen == []
    count(loop, [1, 2])
    assert watch.seen == [(5, 2, False)]


def test_steps_without_drafts_are_no_evidence_and_no_part_of_a_window(
    swapper: Swapper, watch: Watch, loop: OnlineLoop
) -> None:
    run(loop, width=1)
    count(loop, [0, 0], width=1)
    assert (watch.seen, swapper.drafted) == ([], 0)


def test_metrics_count_control_steps_for_the_base(swapper: Swapper) -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(WIDTH, LIVE, None, None, registry)
    loop = OnlineLoop(Served(BASE, "c"), None, swapper, None, metrics)
    for drafting, accepted in ((LIVE, [3, 2]), (BASE, [1, 0])):
        swapper.drafting = drafting
        run(loop)
        count(loop, accepted)
    metrics.close()
    committed = [
        registry.get_sample_value("adaspec_committed_tokens_total", {"version": str(version)})
        for version in (BASE, LIVE)
    ]
    assert committed == [3, 7]
    timed = {"batch": "2", "tokens": "8"}
    assert registry.get_sample_value("adaspec_step_seconds_count", timed) == 1


def test_without_a_watch_a_version_is_trusted_at_once(swapper: Swapper) -> None:
    loop = OnlineLoop(Served(BASE, "c"), None, swapper, None, None)
    swapper.next_swap = swap_to(4)
    loop.before_step()
    assert swapper.trusted == [4]


@pytest.mark.parametrize(("drafts", "stays"), [(3, True), (0, False)])
def test_a_version_is_trusted_or_given_up_when_the_watch_has_decided(
    swapper: Swapper, watch: Watch, loop: OnlineLoop, drafts: int, stays: bool
) -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(WIDTH, LIVE, None, None, registry)
    loop = OnlineLoop(Served(BASE, "c"), None, swapper, watch, metrics)
    swapper.next_swap = swap_to(4)
    loop.before_step()
    assert swapper.trusted == []
    for number in range(16 * 40):
        swapper.drafting = BASE if number % 16 >= 8 else 4
        accepted: Sequence[int] = [number % 2, 2] if swapper.drafting == BASE else [drafts, drafts]
        run(loop)
        count(loop, accepted)
    metrics.close()
    assert (swapper.trusted, len(swapper.rolled_back)) == (([4], 0) if stays else ([], 1))
    gain = registry.get_sample_value("adaspec_gain_over_base", {"version": "4"})
    assert gain == pytest.approx((drafts + 1) / 2.25 - 1)


def test_the_base_is_trusted_where_it_is_the_measure(swapper: Swapper, loop: OnlineLoop) -> None:
    swapper.next_swap = swap_to(BASE)
    swapper.standing = "base"
    loop.before_step()
    assert swapper.trusted == [BASE]
