"""A learner on another machine: it is met with keys, and nobody else is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.feedback import FeedbackReceiver, network_channel
from adaspec.feedback.keys import ServerKeys, make_keys, read_keys
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.versions import VersionStore, lineage_of, open_writer
from tests.server.launch import Server
from tests.server.online_loop import FAST_LEARNER, generate, publish, refusals, swaps, wait_for

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(400)]

PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(12)]


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{min(free_port(), 65000)}"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return dict(make_keys(tmp_path / "keys"))


@pytest.fixture
def server(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, address: str, keys: dict[str, Path]
) -> Iterator[Server]:
    config = tmp_path / "adaspec.toml"
    config.write_text(
        "[tap]\nenabled = true\nrefresh_share = 1.0\n"
        f'[channel]\naddress = "{address}"\nkeys = "{keys["server"]}"\n'
        f'store = "{tmp_path / "store"}"\n'
    )
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(tiny_drafter),
        dtype="float32",
        config=config,
    )
    log = tmp_path / "server.log"
    with start_server(spec, log=log) as process:
        process.wait_until_healthy(300)
        yield Server(process.url, log)


def adaspec(*words: object) -> subprocess.CompletedProcess[str]:
    """One of our commands."""
    return subprocess.run(
        [sys.executable, "-m", "adaspec.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_only_the_learner_and_the_operator_with_the_right_keys_are_met(
    server: Server,
    address: str,
    keys: dict[str, Path],
    tiny_drafter: Path,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    before = {tuple(p): generate(server, p)["output_ids"] for p in PROMPTS}
    strangers = dict(make_keys(tmp_path / "strangers"))

    # One who took the learner's place on the network, and the store, hears and changes nothing.
    false = FeedbackReceiver(
        network_channel(address, strangers["learner"]).feedback, lineage_of(tiny_drafter)
    )
    with_other_key = open_writer(tmp_path / "false", tiny_drafter)
    publish(with_other_key, tiny_drafter)
    with_other_key.close()
    (tmp_path / "false").rename(tmp_path / "store")
    generate(server, PROMPTS[0])
    wait_for(lambda: any("is not signed" in refusal for refusal in refusals(server)))
    assert false.receive(2.0) is None
    false.close()
    assert swaps(server) == []
    (tmp_path / "store").rename(tmp_path / "false")

    settings = tmp_path / "learn.toml"
    settings.write_text(FAST_LEARNER)
    words = {"address": address, "keys": keys["learner"], "drafter": tiny_drafter}
    words |= {"target": tiny_target, "store": tmp_path / "store", "config": settings}
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    with (tmp_path / "learner.log").open("wb") as log:
        learner = subprocess.Popen(
            [sys.executable, "-m", "adaspec.cli.main", "learn", *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 120
        while not swaps(server):
            assert time.monotonic() < deadline, (tmp_path / "learner.log").read_text()[-2000:]
            for prompt in PROMPTS:
                assert generate(server, prompt)["output_ids"] == before[tuple(prompt)]
        signer = read_keys(keys["server"], ServerKeys).signer
        assert VersionStore(tmp_path / "store", signer).current().number > 0

        at = ("control", "--address", address)
        answer = adaspec(*at, "--keys", keys["operator"], "pause")
        assert answer.returncode == 0, answer.stderr
        for wrong in (keys["server"], strangers["operator"]):
            answer = adaspec(*at, "--keys", wrong, "resume")
            assert answer.returncode != 0, wrong
            assert "Traceback" not in answer.stderr
        assert adaspec(*at, "resume").returncode != 0
        answer = adaspec(*at, "--keys", keys["operator"], "status")
        assert "paused" in answer.stdout, answer.stdout + answer.stderr
    finally:
        learner.send_signal(signal.SIGTERM)
        learner.wait(60)
