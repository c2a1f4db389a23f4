"""Fixtures shared by tests of several packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server

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
