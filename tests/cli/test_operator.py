"""`adaspec control` and `adaspec export`, as an operator types them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaspec.cli.main import app
from adaspec.cli.places import only_channel, only_store
from adaspec.control import Inquire, Pin, Publish, Request, RollBack
from adaspec.errors import AdaSpecError
from adaspec.feedback import open_channel
from adaspec.versions import open_writer
from tests.control.test_control import Office
from tests.versions.tiny import tiny_drafter_directory


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a path short enough for sockets."""
    directory = tmp_path_factory.mktemp("c")
    monkeypatch.setenv("ADASPEC_CACHE", str(directory))
    return directory


@pytest.fixture
def asked(cache: Path) -> Iterator[list[Request]]:
    """What a learner of `serve --online` is asked."""
    heard: list[Request] = []

    def act(request: Request) -> str:
        heard.append(request)
        return "so be it"

    office = Office(open_channel(cache / "online" / "abc" / "channel"), act)
    yield heard
    office.close()


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["status"], Inquire()),
        (["roll-back"], RollBack()),
        (["roll-back", "3"], RollBack(version=3)),
        (["pin", "0"], Pin(version=0)),
    ],
)
def test_each_command_asks_the_learner_that_is_there(
    asked: list[Request], words: list[str], request_: Request
) -> None:
    result = CliRunner().invoke(app, ["control", *words])
    assert (result.exit_code, result.stdout) == (0, "so be it\n")
    assert asked == [request_]


def test_a_directory_is_published_by_its_full_path(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["control", "publish", "mine"]).exit_code == 0
    assert asked == [Publish(directory=str(tmp_path / "mine"))]
    assert CliRunner().invoke(app, ["control", "publish", "absent"]).exit_code == 2
    assert len(asked) == 1


def test_it_must_be_clear_which_server_is_meant(cache: Path) -> None:
    with pytest.raises(AdaSpecError, match="has left nothing"):
        only_channel(None)
    for name in ("abc", "def"):
        open_channel(cache / "online" / name / "channel")
    with pytest.raises(AdaSpecError, match="several drafters were served here"):
        only_channel(None)
    given = cache / "online" / "def" / "channel"
    assert only_channel(given) == given
    with pytest.raises(AdaSpecError, match="--store"):
        only_store(None)


def test_the_live_version_is_exported(cache: Path) -> None:
    base = tiny_drafter_directory(cache / "drafter")
    open_writer(cache / "online" / "abc" / "store", base).close()
    result = CliRunner().invoke(app, ["export", str(cache / "out")])
    assert result.exit_code == 0
    assert "version 0 was written to" in result.stdout
    assert (cache / "out" / "config.json").is_file()
    again = CliRunner().invoke(app, ["export", str(cache / "out")])
    assert isinstance(again.exception, AdaSpecError)
