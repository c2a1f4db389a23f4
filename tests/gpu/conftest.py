"""Tests that need a CUDA GPU: `pytest tests/gpu`, with the stock attention backend in Triton.

Everywhere else they are skipped. A test names the servers it talks to with the marker ``servers``;
those of all selected tests start together, and tests that need none run meanwhile.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaspec.versions import VersionWriter, open_writer
from tests.gpu.fleet import Fleet
from tests.gpu.servers import Catalogue
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.online_loop import add_version
from tests.server.tiny_models import write_target

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(6)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "servers(*names): the servers that a test talks to")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a server first."""
    items.sort(key=lambda item: item.get_closest_marker("servers") is not None)


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 512 tokens and three layers."""
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of block size 6 that is often right after `PROMPTS`."""
    return write_fitted_drafter(tmp_path_factory.mktemp("tiny") / "drafter", target, PROMPTS)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each server's files lie, in a directory of its name."""
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="session")
def writer(drafter: Path, places: Path) -> Iterator[VersionWriter]:
    """The version store that the server ``swapped`` follows."""
    (places / "swapped").mkdir()
    opened = open_writer(places / "swapped" / "store", drafter)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def version(writer: VersionWriter, drafter: Path) -> int:
    """A version in that store which is not live; the server ``cold`` starts with it."""
    return add_version(writer, drafter)


@pytest.fixture(autouse=True, scope="session")
def fleet(_needs_cuda: None, request: pytest.FixtureRequest, places: Path) -> Iterator[Fleet]:
    """The servers that the selected tests talk to."""
    markers = [m for item in request.session.items for m in item.iter_markers("servers")]
    # Those of SmolLM2 last: its file may have to be unpacked first.
    names = {name for marker in markers for name in marker.args}
    running = Fleet(places)
    try:
        if names:
            parts = ("target", "drafter", "places", "writer", "version")
            catalogue = Catalogue(*map(request.getfixturevalue, parts))
            for name in sorted(names, key=lambda name: (name.startswith("smollm2"), name)):
                running.start(name, catalogue.launch(name))
        yield running
    finally:
        running.close()
