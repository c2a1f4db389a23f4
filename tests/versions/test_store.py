import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaspec.drafters.checkpoint import load_drafter
from adaspec.errors import AdaSpecError
from adaspec.versions import (
    BASE,
    Provenance,
    VersionStore,
    VersionWriter,
    context_digest,
    is_context_weight,
    lineage_of,
    open_writer,
)
from adaspec.versions import (
    writer as writer_module,
)
from tests.versions.tiny import TINY, tiny_drafter_directory

PROVENANCE = Provenance(
    parent=0,
    mode="frozen-kv",
    objective="test",
    optimiser="test",
    steps=1,
    tokens_seen=10,
    gate=None,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_drafter_directory(tmp_path / "base")


@pytest.fixture
def writer(tmp_path: Path, base: Path) -> Iterator[VersionWriter]:
    writer = open_writer(tmp_path / "store", base)
    yield writer
    writer.close()


def changed(writer: VersionWriter, by: float = 0.5) -> dict[str, Tensor]:
    """The base with its trainable weights moved."""
    tensors = writer.stage(BASE).tensors
    return {
        name: tensor if is_context_weight(name) else tensor + by for name, tensor in tensors.items()
    }


def visible(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "versions").iterdir())


def test_a_new_store_holds_the_base_and_points_at_it(writer: VersionWriter, base: Path) -> None:
    pointer = writer.current()
    assert (pointer.number, pointer.sequence) == (BASE, 0)
    staged = writer.stage(BASE).tensors
    expected = load_file(base / "model.safetensors")
    assert staged.keys() == expected.keys()
    assert all(torch.equal(staged[name], expected[name]) for name in staged)
    assert writer.lineage == lineage_of(base) == lineage_of(writer.path(BASE))


def test_a_version_is_staged_as_it_was_published(writer: VersionWriter) -> None:
    tensors = changed(writer)
    manifest = writer.add(tensors, PROVENANCE)
    assert manifest.number == 1
    assert writer.current().number == BASE  # written, not live
    pointer = writer.point(1, "better")
    reader = VersionStore(writer.directory)
    assert reader.current() == pointer
    assert (pointer.sequence, pointer.sha256, pointer.reason) == (1, manifest.sha256, "better")
    staged = reader.stage(1)
    assert staged.manifest == manifest
    assert all(torch.equal(staged.tensors[name], tensors[name]) for name in tensors)


def test_a_version_is_a_drafter_directory(writer: VersionWriter) -> None:
    tensors = changed(writer)
    writer.add(tensors, PROVENANCE)
    drafter = load_drafter(writer.path(1))
    assert all(torch.equal(p, tensors[name]) for name, p in drafter.named_parameters())


def test_rolling_back_keeps_sequences_and_numbers_growing(writer: VersionWriter) -> None:
    for step in range(2):
        writer.point(writer.add(changed(writer, step + 1.0), PROVENANCE).number, "better")
    back = writer.point(1, "live acceptance fell")
    assert (back.sequence, back.number) == (3, 1)
    assert writer.add(changed(writer, 9.0), PROVENANCE).number == 3


def test_versions_know_whether_they_share_a_draft_cache(writer: VersionWriter) -> None:
    frozen = writer.add(changed(writer), PROVENANCE)
    assert frozen.context_sha256 == writer.base.context_sha256
    tensors = {name: tensor + 1 for name, tensor in changed(writer).items()}
    with pytest.raises(AdaSpecError, match="marked frozen-kv but changes context weights"):
        writer.add(tensors, PROVENANCE)
    full = writer.add(tensors, Provenance(**{**_fields(PROVENANCE), "mode": "full"}))
    assert full.context_sha256 != writer.base.context_sha256


def _fields(struct: Provenance) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_context_weights_are_those_the_draft_cache_is_made_of() -> None:
    with torch.device("meta"):
        from adaspec.drafters.network import BlockDrafter

        names = [name for name, _ in BlockDrafter(TINY).named_parameters()]
    context = {name for name in names if is_context_weight(name)}
    assert context == {
        "fc.weight",
        "hidden_norm.weight",
        *(
            f"layers.{layer}.self_attn.{part}.weight"
            for layer in range(2)
            for part in ("k_proj", "v_proj", "k_norm")
        ),
    }


def test_context_digest_depends_on_context_weights_only(writer: VersionWriter) -> None:
    tensors = writer.stage(BASE).tensors
    moved = dict(tensors) | {"norm.weight": tensors["norm.weight"] + 1}
    assert context_digest(moved) == context_digest(tensors)
    moved = dict(tensors) | {"fc.weight": tensors["fc.weight"] + 1}
    assert context_digest(moved) != context_digest(tensors)


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "foreign tensors", "nan"])
def test_a_damaged_version_is_refused(writer: VersionWriter, damage: str) -> None:
    writer.add(changed(writer), PROVENANCE)
    path = writer.path(1) / "model.safetensors"
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-7])
    elif damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "delete":
        path.unlink()
    elif damage == "foreign tensors":
        save_file({"x": torch.zeros(1)}, path)
    else:
        tensors = changed(writer)
        tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], float("nan"))
        save_file(tensors, path)
    with pytest.raises(AdaSpecError):
        writer.stage(1)
    with pytest.raises(AdaSpecError):
        writer.point(1, "reason")
    assert writer.current().number == BASE


@pytest.mark.parametrize("key", ["number", "lineage", "sha256", "context_sha256", "format"])
def test_a_manifest_that_does_not_fit_is_refused(writer: VersionWriter, key: str) -> None:
    writer.add(changed(writer), PROVENANCE)
    path = writer.path(1) / "manifest.json"
    document = json.loads(path.read_text())
    document[key] = {"number": 2, "lineage": "0" * 16, "format": 2}.get(key, "0" * 64)
    path.write_text(json.dumps(document))
    with pytest.raises(AdaSpecError):
        writer.stage(1)


@pytest.mark.parametrize("content", [b"", b"{", b'{"number": 1}', b"\xff\xfe"])
def test_a_damaged_pointer_is_named(writer: VersionWriter, content: bytes) -> None:
    (writer.directory / "CURRENT").write_bytes(content)
    with pytest.raises(AdaSpecError, match="CURRENT is damaged"):
        writer.current()


def test_a_version_outside_the_store_is_refused(writer: VersionWriter, tmp_path: Path) -> None:
    writer.add(changed(writer), PROVENANCE)
    shutil.move(writer.path(1), tmp_path / "elsewhere")
    writer.path(1).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdaSpecError, match="symbolic link"):
        writer.stage(1)


def test_nonfinite_and_misshapen_weights_are_not_written(writer: VersionWriter) -> None:
    for value in (torch.full((16,), float("inf")), torch.ones(15), torch.ones(16).bfloat16()):
        with pytest.raises(AdaSpecError):
            writer.add(changed(writer) | {"norm.weight": value}, PROVENANCE)
    assert visible(writer.directory) == ["00000000"]


@pytest.mark.parametrize("step", ["save_file", "file_digest", "pointer"])
def test_a_full_disk_changes_nothing(
    writer: VersionWriter, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = writer.current()
    tensors = changed(writer)
    if step == "pointer":
        writer.add(tensors, PROVENANCE)
        monkeypatch.setattr(writer_module.os, "fsync", full)
        with pytest.raises(AdaSpecError, match=r"No space left.*live version is unchanged"):
            writer.point(1, "better")
        assert visible(writer.directory) == ["00000000", "00000001"]
    else:
        monkeypatch.setattr(writer_module, step, full)
        with pytest.raises(AdaSpecError, match=r"No space left.*live version is unchanged"):
            writer.add(tensors, PROVENANCE)
        assert visible(writer.directory) == ["00000000"]
    assert writer.current() == before
    assert not list(writer.directory.glob(".CURRENT.*"))
    monkeypatch.undo()
    writer.point(writer.add(tensors, PROVENANCE).number, "better")
    assert writer.current().sequence == 1


def test_pruning_keeps_the_base_the_live_and_the_newest(writer: VersionWriter) -> None:
    for step in range(5):
        writer.add(changed(writer, step + 1.0), PROVENANCE)
    writer.point(2, "chosen")
    assert writer.prune(keep=1) == [1, 3, 4]
    assert visible(writer.directory) == ["00000000", "00000002", "00000005"]
    assert writer.add(changed(writer), PROVENANCE).number == 6


def test_a_second_learner_is_refused(writer: VersionWriter, base: Path) -> None:
    with pytest.raises(AdaSpecError, match="another learner"):
        open_writer(writer.directory, base)


def test_a_store_of_another_drafter_is_refused(writer: VersionWriter, tmp_path: Path) -> None:
    writer.close()
    other = tiny_drafter_directory(tmp_path / "other", seed=1)
    with pytest.raises(AdaSpecError, match="another drafter"):
        open_writer(writer.directory, other)
    with pytest.raises(AdaSpecError, match="version of another store"):
        open_writer(tmp_path / "new", writer.path(BASE))


def test_a_store_reopens_from_its_own_base(writer: VersionWriter) -> None:
    writer.close()
    again = open_writer(writer.directory, writer.path(BASE))
    assert again.current() == writer.current()
    again.close()


def test_a_directory_without_versions_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="holds no drafter versions"):
        VersionStore(tmp_path)


def test_a_writer_killed_while_publishing_leaves_a_good_store(tmp_path: Path, base: Path) -> None:
    """Kill the writer at ever later moments of an endless run of publications."""
    store = tmp_path / "store"
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from adaspec.versions import Provenance, open_writer, is_context_weight\n"
        "w = open_writer(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "p = Provenance(parent=0, mode='frozen-kv', objective='', optimiser='', steps=1,\n"
        "               tokens_seen=1, gate=None)\n"
        "t = w.stage(0).tensors\n"
        "while True:\n"
        "    t = {n: x if is_context_weight(n) else x + 0.25 for n, x in t.items()}\n"
        "    w.point(w.add(t, p).number, 'endless')\n"
        "    w.prune(3)\n"
        "    print('published', flush=True)\n"
    )
    sequence = -1
    for delay in (0.0, 0.013, 0.031, 0.057):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(store), str(base)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"published\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        reader = VersionStore(store)
        pointer = reader.current()
        assert pointer.sequence > sequence
        sequence = pointer.sequence
        for number in reader.numbers():
            reader.stage(number)
    writer = open_writer(store, base)
    assert all(not name.startswith(".") for name in visible(store))
    assert writer.add(changed(writer), PROVENANCE).number > writer.current().number
    writer.close()


def test_types_are_those_of_the_base(tmp_path: Path) -> None:
    base = tiny_drafter_directory(tmp_path / "base", dtype=torch.bfloat16)
    writer = open_writer(tmp_path / "store", base)
    assert {tensor.dtype for tensor in writer.stage(BASE).tensors.values()} == {torch.bfloat16}
    with pytest.raises(AdaSpecError, match="other tensor types"):
        writer.add({n: t.float() for n, t in writer.stage(BASE).tensors.items()}, PROVENANCE)
    writer.close()


def test_another_network_is_refused(writer: VersionWriter, tmp_path: Path) -> None:
    config = replace(TINY, intermediate_size=48)
    other = open_writer(
        tmp_path / "other", tiny_drafter_directory(tmp_path / "wide", config=config)
    )
    with pytest.raises(AdaSpecError, match="has shape"):
        writer.add(other.stage(BASE).tensors, PROVENANCE)
    other.close()
