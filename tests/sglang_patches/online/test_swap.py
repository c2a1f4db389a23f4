"""When versions go live, and what happens to those that must not."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

from adaspec.errors import AdaSpecError
from adaspec.feedback import open_channel
from adaspec.versions import VersionWriter
from sglang_patches.online.agreement import Agreement
from sglang_patches.online.control import ControlWindows
from sglang_patches.online.served import Served, Swap
from sglang_patches.online.swap import VersionSwapper
from sglang_patches.online.weights import DraftWeights
from tests.sglang_patches.online.conftest import changed, provenance

MakeSwapper = Callable[[], VersionSwapper]


@pytest.fixture
def weights(model: nn.Module) -> DraftWeights:
    return DraftWeights(model, lambda: None)


@pytest.fixture
def target() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def swapper(
    weights: DraftWeights,
    target: nn.Module,
    store: VersionWriter,
    drafter: Path,
    pauses: list[float],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VersionSwapper]:
    channel = open_channel(tmp_path_factory.mktemp("c") / "channel")
    start = Served(0, store.base.context_sha256)
    running = VersionSwapper(
        weights,
        target,
        start,
        drafter,
        store.lineage,
        store.directory,
        channel.versions,
        Agreement(None),
        ControlWindows(weights, start, share=0.0),
        pauses.append,
    )
    yield running
    running.close()


def publish(store: VersionWriter, tensors: dict[str, Tensor], mode: str = "full") -> int:
    number = store.add(tensors, provenance(mode)).number
    store.point(number, f"test publishes {number}")
    return number


def next_swap(swapper: VersionSwapper, timeout: float = 20.0) -> Swap:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        swap = swapper.between_steps()
        if swap is not None:
            return swap
        time.sleep(0.01)
    raise TimeoutError("nothing was swapped")


def wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_published_version_goes_live_and_is_audited(
    swapper: VersionSwapper,
    store: VersionWriter,
    weights: DraftWeights,
    tensors: dict[str, Tensor],
    pauses: list[float],
) -> None:
    version = changed(tensors, seed=1)
    number = publish(store, version)
    swap = next_swap(swapper)
    assert (swap.version, swap.before, swap.rolled_back) == (number, 0, False)
    assert swap.context_changed
    assert weights.differences(version) == []
    wait_for(lambda: len(pauses) == 1)
    assert swapper.audit_failures == 0


def test_frozen_context_weights_are_recognised(
    swapper: VersionSwapper, store: VersionWriter, tensors: dict[str, Tensor]
) -> None:
    publish(store, changed(tensors, seed=1, only="mlp"), mode="frozen-kv")
    assert not next_swap(swapper).context_changed


def test_a_roll_back_restores_the_trusted_version(
    swapper: VersionSwapper, store: VersionWriter, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    versions = {publish(store, changed(tensors, 1)): changed(tensors, 1)}
    good = next_swap(swapper).version
    swapper.trust_live()
    for seed in (2, 3):  # the second replaces the first while that is still on trial
        publish(store, changed(tensors, seed))
        next_swap(swapper)
    swapper.request_roll_back("test says so")
    swap = next_swap(swapper)
    assert (swap.version, swap.rolled_back, swap.reason) == (good, True, "test says so")
    assert weights.differences(versions[good]) == []


def test_the_pointer_back_to_the_live_version_changes_nothing(
    swapper: VersionSwapper, store: VersionWriter, tensors: dict[str, Tensor]
) -> None:
    publish(store, changed(tensors, seed=1))
    next_swap(swapper)
    swapper.request_roll_back("test says so")
    next_swap(swapper)
    store.point(0, "the learner follows")
    later = publish(store, changed(tensors, seed=2))
    assert next_swap(swapper).version == later


def test_a_damaged_version_is_not_served(
    swapper: VersionSwapper, store: VersionWriter, weights: DraftWeights, tensors: dict[str, Tensor]
) -> None:
    number = store.add(changed(tensors, seed=1), provenance()).number
    store.point(number, "about to be damaged")
    file = store.path(number) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    wait_for(lambda: swapper.between_steps() is None and swapper.staging_failures > 0)
    assert swapper.version == 0
    assert weights.differences(tensors) == []


def test_a_changed_target_is_reported(
    swapper: VersionSwapper,
    store: VersionWriter,
    target: nn.Module,
    tensors: dict[str, Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    target.weight.data.add_(1)
    publish(store, changed(tensors, seed=1))
    next_swap(swapper)
    wait_for(lambda: swapper.audit_failures == 1)
    assert "the target" in caplog.text


def test_a_store_that_does_not_exist_yet_is_waited_for(
    weights: DraftWeights,
    target: nn.Module,
    drafter: Path,
    tensors: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    from adaspec.versions import context_digest, lineage_of, open_writer

    channel = open_channel(tmp_path / "channel")
    start = Served(0, context_digest(tensors))
    swapper = VersionSwapper(
        weights,
        target,
        start,
        drafter,
        lineage_of(drafter),
        tmp_path / "later",
        channel.versions,
        Agreement(None),
        ControlWindows(weights, start, share=0.0),
        lambda seconds: None,
    )
    assert swapper.between_steps() is None
    writer = open_writer(tmp_path / "later", drafter)
    number = publish(writer, changed(tensors, seed=1))
    assert next_swap(swapper).version == number
    swapper.close()
    writer.close()


def test_served_weights_are_compared_with_the_live_versions_files(
    swapper: VersionSwapper,
    model: nn.Module,
    store: VersionWriter,
    tensors: dict[str, Tensor],
) -> None:
    assert swapper.differences() == []
    publish(store, changed(tensors, seed=1))
    next_swap(swapper)
    assert swapper.differences() == []
    model.norm.weight.data.mul_(2)  # as an update from outside does
    assert swapper.differences() == ["norm.weight"]
    swapper.request_roll_back("the test asks for it")
    assert next_swap(swapper).version == 0
    assert swapper.differences() == []
    model.load_weights(changed(tensors, seed=2).items())
    assert len(swapper.differences() or ()) > 3


def test_weights_that_are_swapped_meanwhile_are_not_compared(
    swapper: VersionSwapper,
    weights: DraftWeights,
    store: VersionWriter,
    tensors: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(store, changed(tensors, seed=1))
    checks = weights.checks

    def swap_first(expected: dict[str, Tensor]) -> dict[str, Callable[[], bool]]:
        next_swap(swapper)
        return checks(expected)

    monkeypatch.setattr(weights, "checks", swap_first)
    assert swapper.differences() is None


def test_a_live_version_whose_files_are_gone_cannot_be_compared(
    swapper: VersionSwapper, store: VersionWriter, tensors: dict[str, Tensor]
) -> None:
    number = publish(store, changed(tensors, seed=1))
    next_swap(swapper)
    shutil.rmtree(next(store.directory.glob(f"*/*{number}")))
    with pytest.raises(AdaSpecError):
        swapper.differences()
