import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.load.launch import ServerSpec, free_port, start_server

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture(scope="session")
def fake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stand-in server for the whole test session."""
    spec = ServerSpec(target="fake", port=free_port())
    log = tmp_path_factory.mktemp("fake") / "log"
    command = [sys.executable, str(FAKE_SERVER), str(spec.port)]
    with start_server(spec, log=log, command=command) as server:
        server.wait_until_healthy(30)
        yield server.url
