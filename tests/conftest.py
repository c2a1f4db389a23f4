"""Fixtures shared by tests of several packages."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server

ROOT = Path(__file__).parents[1]
FAKE_SERVER = Path(__file__).parent / "load" / "fake_server.py"


@pytest.fixture(scope="session")
def fake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a stand-in for SGLang's HTTP interface, one for the whole test session."""
    spec = ServerSpec(target="fake", port=free_port())
    log = tmp_path_factory.mktemp("fake") / "log"
    command = [sys.executable, str(FAKE_SERVER), str(spec.port)]
    with start_server(spec, log=log, command=command) as server:
        server.wait_until_healthy(30)
        yield server.url


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose modules can be imported, and are forgotten after the test."""
    directory = tmp_path / "own_code"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    yield directory
    for name, module in list(sys.modules.items()):
        if directory == Path(getattr(module, "__file__", None) or "").parent:
            del sys.modules[name]


@pytest.fixture
def examples(own_code: Path) -> Path:
    """`own_code` with the files that `docs/extend.md` shows."""
    page = (ROOT / "docs" / "extend.md").read_text()
    for name, text in re.findall(
        r'^```\w+ title="(.+?)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE
    ):
        (own_code / name).write_text(text)
    return own_code
