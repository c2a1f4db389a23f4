"""Fixtures shared by the server tests: tiny models and a running server.

``ADASPEC_TEST_TARGET`` names a real model directory to run the plain-serving tests against.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.fault_world import World, running_world
from tests.server.launch import Server, serve
from tests.server.tiny_models import write_drafter, write_target

CHUNK = 64


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 512 tokens and three layers."""
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DFlash drafter for `tiny_target`, block size 4."""
    return write_drafter(tmp_path_factory.mktemp("tiny") / "drafter")


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Path:
    """The model that plain serving is tested with."""
    named = os.environ.get("ADASPEC_TEST_TARGET")
    return Path(named) if named else tiny_target


@pytest.fixture(scope="session")
def plain_server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Plain serving with the platform's defaults, but a small prefill chunk and a full log."""
    log_path = tmp_path_factory.mktemp("logs") / "plain.log"
    arguments = ("--chunked-prefill-size", str(CHUNK), "--decode-log-interval", "1")
    with serve(target, *arguments, log_path=log_path) as server:
        yield server


@pytest.fixture(scope="module")
def lasting_world(
    tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """One server that may be troubled, for all tests of a file."""
    with running_world(tiny_target, tiny_drafter, tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture
def world(lasting_world: World) -> Iterator[World]:
    """That server; what troubles it ends with the test."""
    yield lasting_world
    lasting_world.calm()
