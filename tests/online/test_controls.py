"""An operator's word against the gate's."""

import dataclasses
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaspec.control import ControlDesk, Inquire, Pause, Pin, Publish, Resume, RollBack, Unpin
from adaspec.drafters.checkpoint import load_drafter, save_drafter
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.feedback import open_channel
from adaspec.versions import Announcer, VersionWriter, is_context_weight, open_writer
from online.controls import Controls, Hold
from online.publisher import Publisher
from tests.online.world import DRAFTER
from tests.versions.test_store import PROVENANCE


class Bench:
    """Controls over a store of three versions, of which the last is live."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        torch.manual_seed(0)
        save_drafter(BlockDrafter(DRAFTER), directory / "drafter")
        self.channel = open_channel(directory / "channel")
        self.writer: VersionWriter = open_writer(directory / "store", directory / "drafter")
        self.announcer = Announcer(self.channel.versions)
        self.publisher = Publisher(self.writer, self.announcer, keep_versions=4)
        for parent in (0, 1):
            provenance = msgspec.structs.replace(PROVENANCE, parent=parent)
            self.publisher.publish(self.changed(parent + 1), provenance)
        self.restarts = 0
        self.notes: list[str] = []
        self.controls = self.open()

    def open(self) -> Controls:
        return Controls(
            ControlDesk(self.channel),
            self.writer,
            self.publisher,
            self.count,
            self.notes.append,
        )

    def count(self) -> None:
        self.restarts += 1

    def changed(self, by: float, context: bool = False) -> dict[str, torch.Tensor]:
        base = self.writer.stage(0).tensors
        return {n: t + by if context or not is_context_weight(n) else t for n, t in base.items()}

    @property
    def live(self) -> int:
        return self.writer.current().number

    def close(self) -> None:
        self.controls.close()
        self.announcer.close()
        self.writer.close()


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("c"))
    yield bench
    bench.close()


def test_a_roll_back_goes_to_the_parent_and_training_with_it(bench: Bench) -> None:
    assert bench.live == 2
    said = bench.controls._act(RollBack())
    assert said == "rolled back to version 1; version 1 is live, the learner learns."
    assert (bench.live, bench.restarts, bench.controls.rolled_back) == (1, 1, 1)
    bench.controls._act(RollBack())
    assert bench.live == 0
    with pytest.raises(AdaSpecError, match="nothing is older"):
        bench.controls._act(RollBack())
    assert bench.notes == [
        "at an operator's word: rolled back to version 1",
        "at an operator's word: rolled back to version 0",
    ]


def test_a_version_that_is_not_there_changes_nothing(bench: Bench) -> None:
    for request in (RollBack(version=9), Pin(version=9)):
        with pytest.raises(AdaSpecError, match="choose from 0, 1, 2"):
            bench.controls._act(request)
    assert (bench.live, bench.restarts) == (2, 0)
    assert bench.controls.hold == Hold()


def test_a_pin_that_cannot_be_written_down_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("online.controls.replace_file", full)
    with pytest.raises(AdaSpecError, match="nothing was changed"):
        bench.controls._act(Pin(version=1))
    assert (bench.live, bench.restarts, bench.controls.hold) == (2, 0, Hold())


def test_what_is_held_outlives_a_restart(bench: Bench) -> None:
    bench.controls._act(Pause())
    bench.controls._act(Pin(version=1))
    bench.controls.close()
    bench.controls = bench.open()
    assert bench.controls.hold == Hold(paused=True, pinned=1)
    said = bench.controls._act(Inquire())
    assert said.endswith("version 1 is live and pinned (version 1), learning is paused.")
    bench.controls._act(Resume())
    bench.controls._act(Unpin())
    assert bench.controls.hold == Hold()
    assert bench.live == 1


def test_a_damaged_hold_pauses_learning(bench: Bench) -> None:
    bench.controls._act(Pin())
    bench.controls.close()
    (bench.writer.directory / "hold.json").write_text('{"paused": 3')
    bench.controls = bench.open()
    assert bench.controls.hold == Hold(paused=True)


def test_a_pin_on_a_version_that_the_server_gave_up_is_void(bench: Bench) -> None:
    bench.controls._act(Pin())
    bench.controls.released(1)
    assert bench.controls.hold.pinned == 2
    bench.controls.released(2)
    assert bench.controls.hold.pinned is None


@pytest.mark.parametrize("context", [False, True])
def test_a_drafter_is_published_by_hand(bench: Bench, context: bool) -> None:
    drafter = load_drafter(bench.directory / "drafter")
    drafter.load_state_dict(bench.changed(0.5, context))
    save_drafter(drafter, bench.directory / "other")
    bench.controls._act(Publish(directory=str(bench.directory / "other")))
    assert (bench.live, bench.restarts) == (3, 1)
    manifest = bench.writer.manifest(3)
    assert manifest.provenance.mode == ("full" if context else "frozen-kv")
    assert manifest.provenance.parent == 2
    staged = bench.writer.stage(3).tensors
    assert all(torch.equal(staged[n], t) for n, t in bench.changed(0.5, context).items())


def test_a_drafter_that_does_not_fit_is_refused(bench: Bench) -> None:
    other = dataclasses.replace(DRAFTER, intermediate_size=64)
    save_drafter(BlockDrafter(other), bench.directory / "wider")
    broken = shutil.copytree(bench.directory / "drafter", bench.directory / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["fc.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors")
    for name, says in (("wider", "another shape"), ("broken", "finite"), ("absent", "absent")):
        with pytest.raises(AdaSpecError, match=says):
            bench.controls._act(Publish(directory=str(bench.directory / name)))
    with pytest.raises(AdaSpecError, match="absolute"):
        bench.controls._act(Publish(directory="other"))
    assert (bench.live, bench.restarts) == (2, 0)
