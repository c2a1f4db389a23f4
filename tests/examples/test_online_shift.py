"""The commands of `examples/online_shift`, as they are written there, with little traffic."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.drafters.checkpoint import read_drafter_config
from adaspec.load.client import Sampling
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.load.report import summarize
from adaspec.load.runner import LoadPlan, run_plans
from adaspec.target.smollm2 import ensure_smollm2
from online.config import load_learn_config
from tests.cli.test_serve import read_until

ROOT = Path(__file__).parents[2]
WALK = ROOT / "examples" / "online_shift"
COMMANDS = [
    line.strip()
    for block in re.findall(r"```bash\n(.*?)```", (WALK / "README.md").read_text(), re.DOTALL)
    for line in block.strip().splitlines()
]
ADASPEC = [sys.executable, "-m", "adaspec.cli.main"]


def command(start: str) -> list[str]:
    """The one command of the walk-through that begins so, with this Python."""
    (found,) = [line for line in COMMANDS if line.startswith(start)]
    words = shlex.split(found)
    return [*ADASPEC, *words[1:]] if words[0] == "adaspec" else [sys.executable, *words[1:]]


def test_the_settings_are_valid() -> None:
    assert load_learn_config(WALK / "learn.toml").gate.every_steps == 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")


@pytest.fixture(scope="module")
def environment(place: Path) -> dict[str, str]:
    target = ensure_smollm2()
    (place / target.name).symlink_to(target)  # dequantised once for all tests
    return {**os.environ, "ADASPEC_CACHE": str(place), "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def url(place: Path, environment: dict[str, str]) -> Iterator[str]:
    port = free_port()
    serve = command("adaspec serve")
    own = ["--port", str(port), "--log", str(place / "server.log")]
    split = serve.index("--")
    process = subprocess.Popen(
        [*serve[:split], *own, *serve[split:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment, cwd=ROOT,
    )  # fmt: skip
    try:
        read_until(process, "Ctrl-C stops")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def run(words: list[str], place: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        words, env=environment, cwd=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.server
def test_the_walk_through(url: str, place: Path, environment: dict[str, str]) -> None:
    watch = command("adaspec monitor http")
    assert watch[4] == "http://127.0.0.1:30000"
    monitor = subprocess.Popen(
        [*watch[:4], url, *watch[5:]], env=environment, cwd=place, stdout=subprocess.DEVNULL
    )
    *traffic, _, english, french, every, _, most, _ = command("adaspec traffic")
    assert (english, every, most) == ("4x12", "--every", "--max-tokens")
    questions = ROOT / french.partition(":")[2]
    little = ["4x4", f"4x8:{questions}", every, "4", most, "24"]
    said = run([*traffic, url, *little], place, environment)
    lines = re.findall(r"^(bundled|french) +4 +(\d+) .* ([\d.]+)$", said, re.MULTILINE)
    assert [line[:2] for line in lines] == [("bundled", "4"), ("french", "4"), ("french", "4")]
    assert all(float(line[2]) >= 1 for line in lines)
    monitor.send_signal(signal.SIGINT)
    monitor.wait(timeout=30)
    assert (place / "shift.jsonl").stat().st_size > 0
    pytest.importorskip("matplotlib")
    run(command("adaspec monitor --plot"), place, environment)
    assert (place / "shift.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_what_was_learned_can_be_taken_back_or_away(
    url: str, place: Path, environment: dict[str, str]
) -> None:
    assert "the learner learns" in run(command("adaspec control status"), place, environment)
    roll_back = subprocess.run(
        command("adaspec control roll-back"), env=environment, cwd=place,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = roll_back.stdout + roll_back.stderr
    assert ("rolled back" in words) == (roll_back.returncode == 0)
    assert "rolled back" in words or "nothing is older" in words
    run(command("adaspec export"), place, environment)
    assert read_drafter_config(place / "french-drafter").block_size == 16


@pytest.mark.server
def test_stock_dflash_serves_what_was_taken_away(place: Path) -> None:
    """After the tests above. AdaSpec's platform is all that is not SGLang's here."""
    words, port = command("python -m sglang"), free_port()
    target = str(ensure_smollm2())
    words[words.index("TARGET")] = target
    words[words.index("french-drafter")] = str(place / "french-drafter")
    spec = ServerSpec(target=target, port=port)
    plan = LoadPlan(
        concurrency=2, requests=4, warmup=0, sampling=Sampling(max_tokens=24, temperature=0.0)
    )
    log = place / "stock.log"
    with start_server(spec, log=log, command=[*words, "--port", str(port)]) as server:
        server.wait_until_healthy(400)
        (run_,) = run_plans(spec.url, ["Why is the sky blue?", "Pourquoi pleut-il ?"], [plan])
    summary = summarize(run_)
    assert summary.errors == 0
    assert summary.committed_per_pass is not None
    assert summary.committed_per_pass > 1.2
