"""Tests that need a CUDA GPU: `pytest tests/gpu`, with the stock attention backend in Triton.

Everywhere else they are skipped. A test names the servers it talks to with the marker ``servers``;
those of all selected tests start together, and tests that need none run meanwhile.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.versions import VersionWriter, open_writer
from tests.gpu.fleet import Fleet
from tests.gpu.servers import Catalogue
from tests.server.online_loop import add_version

# SmolLM2's chat template around six short questions.
_BEFORE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198),
]
_AFTER = [2, 198, 1, 520, 9531, 198]
_QUESTIONS = [
    [9825, 429, 582, 288, 7522, 281, 1924, 30],  # Count from one to twenty in words.
    [1780, 314, 216, 33, 34, 1711, 216, 39, 47, 16374, 30],  # What is 12 times 7? Explain.
    [19161, 253, 421, 30614, 563, 5249, 30],  # Write a haiku about rain.
    [6106, 260, 9244, 282, 260, 3693, 817, 30],  # List the planets of the solar system.
    [19161, 253, 5905, 1517, 338, 7845, 827, 2966, 30],  # Write a Python function that adds …
    [4898, 314, 260, 6376, 4461, 47],  # Why is the sky blue?
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[*_BEFORE, *question, *_AFTER] for question in _QUESTIONS]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "servers(*names): the servers that a test talks to")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a server first."""
    items.sort(key=lambda item: item.get_closest_marker("servers") is not None)


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA GPU")


@pytest.fixture(scope="session")
def drafter() -> Path:
    """The bundled one, of block size 16."""
    return BUNDLED_DRAFTER


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
    names = {name for marker in markers for name in marker.args}
    running = Fleet(places)
    try:
        if names:
            parts = ("places", "writer", "version")
            catalogue = Catalogue(*map(request.getfixturevalue, parts))
            for name in sorted(names):
                running.start(name, catalogue.launch(name))
        yield running
    finally:
        running.close()
