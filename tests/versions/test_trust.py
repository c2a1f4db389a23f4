"""Versions are the learner's: signed where there are keys, else nobody else's to write."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, open_channel
from adaspec.feedback.keys import LearnerKeys, ServerKeys, make_keys, read_keys
from adaspec.versions import (
    BASE,
    Announcer,
    VersionFollower,
    VersionStore,
    VersionWriter,
    export_version,
    open_writer,
)
from adaspec.versions.trust import SIGNATURE_NAME, sign
from tests.versions.test_follow import eventually
from tests.versions.test_store import PROVENANCE, changed
from tests.versions.tiny import tiny_drafter_directory


@dataclass(frozen=True)
class Pair:
    """Keys of a learner and its servers, as files and as `open_writer` and `VersionStore` ask."""

    learner: Path
    server: Path
    signing: str
    signer: str


def make_pair(directory: Path) -> Pair:
    files = make_keys(directory)
    learner, server = files["learner"], files["server"]
    signing = read_keys(learner, LearnerKeys).signing
    return Pair(learner, server, signing, read_keys(server, ServerKeys).signer)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "keys")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_drafter_directory(tmp_path / "base")


@pytest.fixture
def writer(tmp_path: Path, base: Path, pair: Pair) -> Iterator[VersionWriter]:
    writer = open_writer(tmp_path / "store", base, pair.signing)
    yield writer
    writer.close()


def publish(writer: VersionWriter, by: float = 0.5) -> Path:
    """A new live version; its directory."""
    number = writer.add(changed(writer, by), PROVENANCE).number
    writer.point(number, "test")
    return writer.path(number)


def test_signed_versions_are_read(writer: VersionWriter, pair: Pair) -> None:
    publish(writer)
    store = VersionStore(writer.directory, pair.signer)
    assert store.stage(BASE).manifest.number == BASE
    assert store.stage(1).manifest.number == 1


def test_a_store_made_without_keys_is_not_gone_on_with(
    tmp_path: Path, base: Path, pair: Pair
) -> None:
    open_writer(tmp_path / "plain", base).close()
    with pytest.raises(AdaSpecError, match="is not signed"):
        open_writer(tmp_path / "plain", base, pair.signing)
    with pytest.raises(AdaSpecError, match="is not signed"):
        VersionStore(tmp_path / "plain", pair.signer)


def test_the_versions_of_another_learner_are_refused(writer: VersionWriter, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "other")
    with pytest.raises(AdaSpecError, match="not signed by the learner"):
        VersionStore(writer.directory, other.signer)


@pytest.mark.parametrize("forgery", ["edited", "unsigned", "borrowed", "resigned", "link", "long"])
def test_a_forged_version_is_refused(
    writer: VersionWriter, pair: Pair, tmp_path: Path, forgery: str
) -> None:
    directory = publish(writer)
    manifest, signature = directory / "manifest.json", directory / SIGNATURE_NAME
    if forgery == "edited":
        manifest.write_bytes(manifest.read_bytes().replace(b'"steps": 1', b'"steps": 9'))
    elif forgery == "unsigned":
        signature.unlink()
    elif forgery == "borrowed":
        shutil.copy(writer.path(BASE) / SIGNATURE_NAME, signature)
    elif forgery == "resigned":
        other = make_pair(tmp_path / "other")
        signature.write_bytes(sign(manifest.read_bytes(), other.signing))
    elif forgery == "link":
        signature.rename(tmp_path / "elsewhere")
        signature.symlink_to(tmp_path / "elsewhere")
    else:
        signature.write_bytes(signature.read_bytes() + b"\0")
    store = VersionStore(writer.directory, pair.signer)
    with pytest.raises(AdaSpecError, match="is not signed"):
        store.stage(1)
    assert store.stage(BASE).manifest.number == BASE


def test_other_weights_under_a_signed_manifest_are_refused(
    writer: VersionWriter, pair: Pair
) -> None:
    first, second = publish(writer, 0.5), publish(writer, 0.25)
    shutil.copy(second / "model.safetensors", first / "model.safetensors")
    with pytest.raises(AdaSpecError, match="SHA-256"):
        VersionStore(writer.directory, pair.signer).stage(1)


def test_a_server_with_keys_follows_only_its_learner(
    tmp_path: Path, base: Path, pair: Pair
) -> None:
    def channel(keys: Path) -> Channel:
        return open_channel(tmp_path / "channel", keys)

    writer = open_writer(tmp_path / "store", base, pair.signing)
    announcer = Announcer(channel(pair.learner).versions)
    follower = VersionFollower(writer.directory, channel(pair.server).versions, writer.lineage)
    try:
        arrival = eventually(follower.take)
        assert arrival.pointer.number == BASE  # type: ignore[attr-defined]
        forged = writer.add(changed(writer, 0.5), PROVENANCE).number
        (writer.path(forged) / SIGNATURE_NAME).write_bytes(b"\0" * 64)
        pointer = (writer.directory / "CURRENT").read_bytes()
        sha256 = next(
            line
            for line in (writer.path(forged) / "manifest.json").read_text().split('"')
            if len(line) == 64
        )
        moved = pointer.replace(b'"number":0', b'"number":1').replace(
            writer.base.sha256.encode(), sha256.encode()
        )
        (writer.directory / "CURRENT").write_bytes(moved.replace(b'"sequence":0', b'"sequence":9'))
        refusal = eventually(follower.take_refusal)
        assert "is not signed" in refusal.reason  # type: ignore[attr-defined]
        assert follower.take() is None
    finally:
        follower.close()
        announcer.close()
        writer.close()


def test_a_server_needs_its_own_keys(tmp_path: Path, pair: Pair) -> None:
    endpoint = open_channel(tmp_path / "channel", pair.learner).versions
    with pytest.raises(AdaSpecError, match="server's are needed"):
        VersionFollower(tmp_path / "store", endpoint, "lineage")


@pytest.mark.parametrize("place", [".", "versions", "versions/00000001"])
def test_without_keys_nobody_else_may_write(
    tmp_path: Path, base: Path, pair: Pair, place: str
) -> None:
    open_store = open_writer(tmp_path / "store", base)
    publish(open_store)
    open_store.close()
    (tmp_path / "store" / place).chmod(0o770)
    with pytest.raises(AdaSpecError, match="others can write to"):
        VersionStore(tmp_path / "store").stage(1)


def test_with_keys_others_may_write(writer: VersionWriter, pair: Pair) -> None:
    publish(writer)
    for place in (writer.directory, writer.path(1).parent, writer.path(1)):
        place.chmod(0o777)
    assert VersionStore(writer.directory, pair.signer).stage(1).manifest.number == 1


def test_a_new_store_lets_nobody_else_in(tmp_path: Path, base: Path) -> None:
    before = os.umask(0)
    try:
        writer = open_writer(tmp_path / "store", base)
        publish(writer)
        writer.close()
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    written = [path for path in (tmp_path / "store" / "versions").rglob("*")]
    assert written
    assert not [path for path in written if path.stat().st_mode & 0o022]


def test_an_export_carries_no_signature(writer: VersionWriter, tmp_path: Path) -> None:
    publish(writer)
    export_version(writer.directory, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
