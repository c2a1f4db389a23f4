"""What tests of the online loop on a live server share: its files, its traffic, its learner."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from adaspec.drafters.checkpoint import read_tensors
from adaspec.load.launch import ServerSpec, free_port
from adaspec.versions import Provenance, VersionWriter
from tests.server.launch import Server
from tests.server.recording_server import RECORDS_VARIABLE, DraftPass, read_passes

LENGTH = 32
# Learns within seconds from a few tiny requests.
FAST_LEARNER = """\
save_seconds = 0.5
[process]
nice = 0
[replay]
held_back = 0.3
fresh = 4
[batch]
trajectories = 2
blocks = 12
passes = 40.0
[optimiser]
learning_rate = 5e-3
[gate]
every_steps = 30
min_requests = 4
max_requests = 12
passes = 8
"""


def write_server_config(directory: Path, refresh_share: float, more: str = "") -> Path:
    """The server's configuration: feedback and versions through ``directory``."""
    config = directory / "adaspec.toml"
    config.write_text(
        f"[tap]\nenabled = true\nrefresh_share = {refresh_share}\n"
        f'[channel]\ndirectory = "{directory / "channel"}"\nstore = "{directory / "store"}"\n{more}'
    )
    return config


def generate(
    server: Server, prompt: list[int], rid: str | None = None, length: int = LENGTH
) -> dict:
    """The answer to one greedy request of exactly ``length`` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    named = {} if rid is None else {"rid": rid}
    return server.generate(input_ids=prompt, sampling_params=sampling, **named)


def swaps(server: Server) -> list[tuple[int, int]]:
    """(before, after) of every swap in the server's log."""
    found = re.findall(r"drafter swapped from version (\d+) to (\d+)", server.log())
    return [(int(before), int(after)) for before, after in found]


def refusals(server: Server) -> list[str]:
    """What the server has said about versions that it did not take."""
    return re.findall(r"a drafter version was not loaded: (.*)", server.log())


def metric(server: Server, name: str, **labels: str) -> float:
    """A value of the server's Prometheus endpoint, 0 if it is not there yet."""
    text = httpx.get(f"{server.url}/metrics/", timeout=30.0).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return once ``condition`` holds; an assertion fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@dataclass
class Learner:
    """`adaspec learn` in a process of its own, which may be killed and started again.

    Attributes:
        directory: of channel, store, configuration and log.
        settings: the learner's configuration file.
    """

    drafter: Path
    target: Path
    directory: Path
    settings: str = FAST_LEARNER
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self) -> None:
        config = self.directory / "learn.toml"
        config.write_text(self.settings)
        options = {"drafter": self.drafter, "target": self.target, "config": config}
        options |= {"store": self.directory / "store", "channel": self.directory / "channel"}
        words = [word for name, path in options.items() for word in (f"--{name}", str(path))]
        with (self.directory / "learner.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "adaspec.cli.main", "learn", *words],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                )
            )

    def end(self, number: int) -> int:
        self.processes[-1].send_signal(number)
        return self.processes[-1].wait(60)

    def log(self) -> str:
        return (self.directory / "learner.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def add_version(writer: VersionWriter, drafter: Path, seed: int = 5) -> int:
    """Store a version with all weights changed a little, those of the context too."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (t + 0.02 * torch.randn(t.shape, generator=generator)).to(t.dtype)
        for name, t in read_tensors(drafter).items()
    }
    provenance = Provenance(
        parent=0, mode="full", objective="", optimiser="", steps=1, tokens_seen=1, gate=None
    )
    return writer.add(tensors, provenance).number


def publish(writer: VersionWriter, drafter: Path) -> int:
    """Store such a version and make it the live one."""
    number = add_version(writer, drafter)
    writer.point(number, "published by a test")
    return number


def recording_spec(
    target: Path, drafter: Path, directory: Path, config: Path, *extra: str
) -> ServerSpec:
    """A `recording_server` that writes every draft pass to ``directory / "records"``."""
    records = directory / "records"
    records.mkdir(parents=True)
    return ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        config=config,
        extra=("--skip-server-warmup", *extra),
        environment={RECORDS_VARIABLE: str(records)},
    )


def recorded_passes(
    server: Server,
    directory: Path,
    prompts: Sequence[list[int]],
    change: Callable[[Server], object],
) -> tuple[list[DraftPass], int]:
    """Every draft pass of a few requests after a change of the running server, and the tokens of
    an earlier request that the first of them found in the prefix cache.
    """
    generate(server, prompts[0], "before")
    change(server)
    cached = generate(server, prompts[0], "after")["meta_info"]["cached_tokens"]
    server.flush_cache()
    for i, prompt in enumerate(prompts):
        generate(server, prompt, f"recorded-{i}")
    passes = read_passes(directory / "records")
    return [step for step in passes if "recorded" in step.request[0]], cached
