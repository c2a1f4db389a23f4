"""Control windows on served weights: the base drafts in them, and whatever happens meanwhile, the
live version before and after."""

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adaspec.feedback import open_channel
from adaspec.versions import VersionWriter
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.control import WINDOW_STEPS, ControlWindows
from sglang_patches.online.served import Served
from sglang_patches.online.swap import VersionSwapper
from sglang_patches.online.weights import DraftWeights
from tests.sglang_patches.online.conftest import changed
from tests.sglang_patches.online.test_swap import next_swap, publish, wait_for

Check = Callable[[], bool]
FROZEN = "mlp"  # changed alone, a version keeps the base's context


@pytest.fixture
def weights(model: nn.Module, tensors: dict[str, Tensor]) -> DraftWeights:
    held = DraftWeights(model, lambda: None)
    held.hold_base(tensors)
    return held


@pytest.fixture
def control(weights: DraftWeights, store: VersionWriter) -> ControlWindows:
    return ControlWindows(weights, Served(0, store.base.context_sha256), share=0.125)


@pytest.fixture
def swapper(
    weights: DraftWeights,
    control: ControlWindows,
    store: VersionWriter,
    drafter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VersionSwapper]:
    running = VersionSwapper(
        weights,
        nn.Linear(4, 4),
        control.base,
        drafter,
        store.lineage,
        store.directory,
        open_channel(tmp_path_factory.mktemp("c") / "channel").versions,
        Agreement(None),
        control,
        lambda seconds: None,
    )
    yield running
    running.close()


def step(swapper: VersionSwapper) -> int:
    """Run a step; the version that drafted it."""
    with torch.inference_mode():
        swapper.between_steps()
    swapper.count_draft()
    return swapper.drafting


def enter_window(swapper: VersionSwapper) -> None:
    while step(swapper) == swapper.version:
        pass


def test_windows_hold_the_base_and_nothing_else_does(
    swapper: VersionSwapper,
    store: VersionWriter,
    weights: DraftWeights,
    model: nn.Module,
    tensors: dict[str, Tensor],
) -> None:
    version = changed(tensors, seed=1, only=FROZEN)
    addresses = [p.data_ptr() for p in model.parameters()]
    publish(store, version, "frozen-kv")
    number = next_swap(swapper).version
    assert swapper.standing == "controlled"
    drafted_by = []
    for _ in range(600):
        drafted_by.append(step(swapper))
        if drafted_by[-2:] in ([number, 0], [0, number]):
            served = tensors if drafted_by[-1] == 0 else version
            assert weights.differences(served) == []
    assert set(drafted_by) == {0, number}
    assert [p.data_ptr() for p in model.parameters()] == addresses
    late = drafted_by[-256:]
    assert late.count(0) == len(late) / 8


def test_windows_are_complete_and_early_ones_close_together(
    swapper: VersionSwapper, store: VersionWriter, tensors: dict[str, Tensor]
) -> None:
    publish(store, changed(tensors, seed=1, only=FROZEN), "frozen-kv")
    number = next_swap(swapper).version
    steps = [step(swapper) == number for _ in range(600)]
    runs = [len(list(run)) for _, run in groupby(steps)]
    windows, gaps = runs[1:-1:2], runs[2:-1:2]
    assert set(windows) == {WINDOW_STEPS}
    assert gaps == sorted(gaps)
    assert gaps[0] == WINDOW_STEPS
    assert gaps[-1] == 7 * WINDOW_STEPS


def test_packed_copies_follow_into_a_window(
    swapper: VersionSwapper, store: VersionWriter, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    layer = model.layers[0].mlp.gate_up_proj
    x = torch.randn(5, layer.weight.shape[1])
    base = layer.quant_method.apply(layer, x)
    publish(store, changed(tensors, seed=1, only=FROZEN), "frozen-kv")
    next_swap(swapper)
    assert not torch.allclose(layer.quant_method.apply(layer, x), base)
    enter_window(swapper)
    assert torch.equal(layer.quant_method.apply(layer, x), base)


def test_a_version_that_arrives_in_a_window_goes_live(
    swapper: VersionSwapper, store: VersionWriter, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    versions = {}
    for seed in (1, 2):
        version = changed(tensors, seed, only=FROZEN)
        versions[publish(store, version, "frozen-kv")] = version
        swap = next_swap(swapper)
        assert swapper.drafting == swap.version
        assert weights.differences(versions[swap.version]) == []
        swapper.trust_live()
        enter_window(swapper)
    good = swap.version
    publish(store, changed(tensors, 3, only=FROZEN), "frozen-kv")
    next_swap(swapper)
    enter_window(swapper)
    swapper.request_roll_back("test says so")
    assert next_swap(swapper).version == good
    assert weights.differences(versions[good]) == []


def test_a_trusted_version_falls_back_to_the_base(
    swapper: VersionSwapper, store: VersionWriter, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    publish(store, changed(tensors, seed=1, only=FROZEN), "frozen-kv")
    next_swap(swapper)
    swapper.trust_live()
    enter_window(swapper)
    swapper.request_roll_back("below the base")
    swap = next_swap(swapper)
    assert (swap.version, swap.rolled_back, swap.context_changed) == (0, True, False)
    assert (swapper.standing, swapper.trusted) == ("base", 0)
    assert weights.differences(tensors) == []
    assert {step(swapper) for _ in range(100)} == {0}
    # It is what the next version falls back to, and what its windows hold.
    publish(store, changed(tensors, seed=2, only=FROZEN), "frozen-kv")
    next_swap(swapper)
    enter_window(swapper)
    assert weights.differences(tensors) == []
    swapper.request_roll_back("test says so")
    assert next_swap(swapper).version == 0
    assert weights.differences(tensors) == []


def test_a_version_with_another_context_gets_no_windows(
    swapper: VersionSwapper,
    store: VersionWriter,
    tensors: dict[str, Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for seed in (1, 2):
        publish(store, changed(tensors, seed))
        number = next_swap(swapper).version
        assert swapper.standing == "alone"
        assert {step(swapper) for _ in range(100)} == {number}
    assert caplog.text.count("context weights of its own") == 1


def test_the_audit_waits_for_the_end_of_a_window(
    swapper: VersionSwapper,
    store: VersionWriter,
    weights: DraftWeights,
    tensors: dict[str, Tensor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    make_checks = weights.checks
    comparing, window_open, compared = (threading.Event() for _ in range(3))

    def checks_during_which_a_window_opens(version: dict[str, Tensor]) -> dict[str, Check]:
        checks = make_checks(version)
        name, check = next(iter(checks.items()))

        def first_check() -> bool:
            comparing.set()
            window_open.wait(20)
            found = check()
            compared.set()
            return found

        return {**checks, name: first_check}

    monkeypatch.setattr(weights, "checks", checks_during_which_a_window_opens)
    publish(store, changed(tensors, seed=1, only=FROZEN), "frozen-kv")
    number = next_swap(swapper).version
    assert comparing.wait(20)
    enter_window(swapper)
    window_open.set()
    assert compared.wait(20)
    assert "as published" not in caplog.text
    while step(swapper) == 0:
        pass
    wait_for(lambda: f"version {number} is served as published" in caplog.text)
    assert swapper.audit_failures == 0


def test_without_a_share_nothing_is_held_and_nothing_is_exchanged(
    model: nn.Module, store: VersionWriter
) -> None:
    start = Served(0, store.base.context_sha256)
    control = ControlWindows(DraftWeights(model, lambda: None), start, share=0.0)
    control.follow(Served(1, start.context_sha256))
    for _ in range(100):
        control.before_step()
        control.count_draft()
    assert (control.standing, control.exchanges) == ("alone", 0)
