"""A version taken out of its store is a drafter like any other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaspec.drafters.checkpoint import load_drafter
from adaspec.errors import AdaSpecError
from adaspec.versions import VersionWriter, export_version, open_writer
from tests.versions.test_store import PROVENANCE, changed
from tests.versions.tiny import tiny_drafter_directory


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[VersionWriter]:
    writer = open_writer(tmp_path / "store", tiny_drafter_directory(tmp_path / "drafter"))
    yield writer
    writer.close()


def test_the_live_version_becomes_a_drafter_directory(
    writer: VersionWriter, tmp_path: Path
) -> None:
    writer.add(changed(writer), PROVENANCE)
    writer.point(1, "better")
    assert export_version(writer.directory, tmp_path / "out") == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    weights = load_drafter(tmp_path / "out").state_dict()
    assert all(torch.equal(weights[n], t) for n, t in writer.stage(1).tensors.items())
    # It can begin a store of its own.
    open_writer(tmp_path / "another", tmp_path / "out").close()


def test_an_older_version_can_be_exported(writer: VersionWriter, tmp_path: Path) -> None:
    writer.add(changed(writer), PROVENANCE)
    writer.point(1, "better")
    assert export_version(writer.directory, tmp_path / "out", 0) == 0
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        tmp_path / "drafter" / "config.json"
    ).read_bytes()


def test_bad_exports_are_refused_and_leave_nothing(writer: VersionWriter, tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="version 5 is not in"):
        export_version(writer.directory, tmp_path / "out", 5)
    with pytest.raises(AdaSpecError, match="holds no drafter versions"):
        export_version(tmp_path / "nothing", tmp_path / "out")
    writer.add(changed(writer), PROVENANCE)
    weights = writer.path(1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(AdaSpecError, match="damaged"):
        export_version(writer.directory, tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").mkdir()
    with pytest.raises(AdaSpecError, match="exists; name"):
        export_version(writer.directory, tmp_path / "taken", 0)
