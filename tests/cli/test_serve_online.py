"""`adaspec serve --online`: a real learner beside a stand-in server."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from adaspec.cli.serve_plan import plan_server
from adaspec.config import load_config
from adaspec.drafters.checkpoint import save_drafter
from adaspec.drafters.network import BlockDrafter
from adaspec.errors import AdaSpecError
from adaspec.load.launch import free_port
from tests.cli.test_learner_keeper import wait_for
from tests.cli.test_serve import options, read_until, start
from tests.online.test_learner import Server, write_config
from tests.online.world import DRAFTER, TinyTarget, save_target
from tests.server.tiny_models import write_drafter, write_target


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with a path short enough for sockets, whatever the test is called."""
    return tmp_path_factory.mktemp("c")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Target and drafter directories."""
    target, drafter = tmp_path / "tiny-target", tmp_path / "tiny-drafter"
    return str(write_target(target)), str(write_drafter(drafter))


@pytest.fixture
def serving(cache: Path, pair: tuple[str, str]) -> Iterator[subprocess.Popen[str]]:
    target, drafter = pair
    process = start(
        cache, "--online", "--target", target, "--drafter", drafter, "--port", str(free_port())
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def learner_of(process: subprocess.Popen[str], cache: Path) -> psutil.Process:
    """The learner, once it has opened its store."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if list(cache.glob("online/*/store/CURRENT")):
            for child in psutil.Process(process.pid).children():
                if "online" in child.cmdline():
                    return child
        time.sleep(0.1)
    raise AssertionError("no learner was started")


def test_both_start_and_both_stop(serving: subprocess.Popen[str], cache: Path) -> None:
    said = read_until(serving, "Ctrl-C stops")
    assert "Learner: versions go to" in said
    learner = learner_of(serving, cache)
    serving.send_signal(signal.SIGTERM)
    rest, _ = serving.communicate(timeout=60)
    assert serving.returncode == 0, rest
    assert not learner.is_running()
    assert "has ended" not in rest


def test_the_server_outlives_its_learner_which_comes_back(
    serving: subprocess.Popen[str], cache: Path
) -> None:
    read_until(serving, "Ctrl-C stops")
    first = learner_of(serving, cache)
    first.kill()
    said = read_until(serving, "The learner has ended with code -9 and is started again in 1 s")
    assert ".learner.log): " in said
    assert serving.poll() is None
    wait_for(lambda: learner_of(serving, cache) != first)
    serving.send_signal(signal.SIGTERM)
    rest, _ = serving.communicate(timeout=60)
    assert serving.returncode == 0
    assert "has ended" not in rest


def test_a_killed_learner_resumes_where_it_was(cache: Path) -> None:
    """A simulated server's feedback, and the learner that the command keeps alive."""
    target = save_target(cache / "target")
    torch.manual_seed(1)
    save_drafter(BlockDrafter(DRAFTER), cache / "drafter")
    server = Server(cache, cache / "drafter", TinyTarget(target))
    config = cache / "adaspec.toml"
    config.write_text(
        f'[channel]\ndirectory = "{server.channel_directory}"\nstore = "{server.store}"\n'
    )
    log = cache / "serve.log"
    process = start(
        cache, "--online", "--target", str(target), "--drafter", str(cache / "drafter"),
        "--port", str(free_port()), "--config", str(config), "--log", str(log),
        "--learn-config", str(write_config(cache / "learn.toml")),
    )  # fmt: skip
    try:
        before = server.wait_for(lambda status: status.published >= 1)
        psutil.Process(before.process).kill()
        after = server.wait_for(lambda status: status.process not in (0, before.process))
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        server.close()
    assert process.returncode == 0, said
    assert "ended with code -9" in said
    assert after.published >= 1
    assert after.sequence >= before.sequence
    resumed = re.search(r"resumed after (\d+) steps", log.with_suffix(".learner.log").read_text())
    assert resumed is not None
    assert int(resumed[1]) > 0


def test_the_learner_does_not_outlive_a_killed_command(
    serving: subprocess.Popen[str], cache: Path
) -> None:
    learner = learner_of(serving, cache)
    serving.kill()
    learner.wait(30)


def test_the_given_configuration_is_completed(
    tmp_path: Path, cache: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADASPEC_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    given = tmp_path / "given.toml"
    given.write_text('[verify]\nlength = 3\n[channel]\ndirectory = "elsewhere"\n[tap]\nshare=0.5\n')
    target, drafter = pair
    plan = plan_server(
        options(online=True, target=target, drafter=Path(drafter), config=given),
        progress=lambda line: None,
    )
    assert plan.spec.config is not None
    config = load_config(plan.spec.config)
    assert (config.verify.length, config.tap.share, config.tap.enabled) == (3, 0.5, True)
    assert config.channel.directory == "elsewhere"
    assert str(config.channel.store).startswith(str(cache))
    assert plan.learner is not None
    command = plan.learner.command
    assert command[command.index("--channel") + 1] == "elsewhere"
    assert str(plan.learner.status) == f"ipc://{tmp_path}/elsewhere/status.sock"


def test_a_hub_name_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(AdaSpecError, match="no local directory"):
        plan_server(
            options(online=True, target="some/model", drafter=Path(pair[1])),
            progress=lambda line: None,
        )


def test_a_cache_directory_too_long_for_sockets_is_refused(
    tmp_path: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADASPEC_CACHE", str(tmp_path / ("long" * 20)))
    with pytest.raises(AdaSpecError, match="too long a path for a socket"):
        plan_server(
            options(online=True, target=pair[0], drafter=Path(pair[1])), progress=lambda line: None
        )
