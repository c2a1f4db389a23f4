"""The online loop on a live server: feedback leaves, a learner learns, versions go live.

Outputs must be the target's before, during and after swaps, whatever happens to the learner.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from adaspec.drafters.checkpoint import read_tensors
from adaspec.feedback import FeedbackReceiver, RollbackRecord, open_channel
from adaspec.load.launch import ServerSpec, free_port, start_server
from adaspec.versions import Provenance, VersionStore, VersionWriter, open_writer
from tests.server.fitted_drafter import write_fitted_drafter
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.recording_server import RECORDS_VARIABLE, DraftPass, read_passes
from tests.server.reference import ReferenceModel

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

RECORDER = "tests.server.recording_server"
PROMPTS = [[5, 40 + i, 90 - i, 17, 33 + 2 * i] for i in range(12)]
LENGTH = 32


def write_server_config(directory: Path, refresh_share: float) -> Path:
    config = directory / "adaspec.toml"
    config.write_text(
        f"[tap]\nenabled = true\nrefresh_share = {refresh_share}\n"
        f'[channel]\ndirectory = "{directory / "channel"}"\nstore = "{directory / "store"}"\n'
        "[watch]\nwindow_tokens = 2000\n"
    )
    return config


def generate(server: Server, prompt: list[int], rid: str | None = None) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    named = {} if rid is None else {"rid": rid}
    return server.generate(input_ids=prompt, sampling_params=sampling, **named)


def swaps(server: Server) -> list[tuple[int, int]]:
    """(before, after) of every swap in the server's log."""
    found = re.findall(r"drafter swapped from version (\d+) to (\d+)", server.log())
    return [(int(before), int(after)) for before, after in found]


def metric(server: Server, name: str, **labels: str) -> float:
    """A value of the server's Prometheus endpoint, 0 if it is not there yet."""
    text = httpx.get(f"{server.url}/metrics/", timeout=30.0).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@dataclass
class Learner:
    """`adaspec learn` in a process of its own, which may be killed and started again."""

    drafter: Path
    target: Path
    directory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        config = self.directory / "learn.toml"
        config.write_text(
            "save_seconds = 0.5\n"
            "[process]\nnice = 0\n"
            "[replay]\nheld_back = 0.3\n"
            "[batch]\ntrajectories = 2\nblocks = 12\npasses = 40.0\n"
            "[optimiser]\nlearning_rate = 5e-3\n"
            "[gate]\nevery_steps = 30\nmin_requests = 4\nmax_requests = 12\npasses = 8\n"
        )
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


@pytest.fixture
def learner(tiny_drafter: Path, tiny_target: Path, tmp_path: Path) -> Iterator[Learner]:
    process = Learner(tiny_drafter, tiny_target, tmp_path)
    yield process
    process.close()


@pytest.fixture
def server(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Iterator[Server]:
    spec = ServerSpec(
        target=str(tiny_target),
        port=free_port(),
        drafter=str(tiny_drafter),
        dtype="float32",
        config=write_server_config(tmp_path, refresh_share=0.3),
        extra=("--enable-metrics",),
    )
    log = tmp_path / "server.log"
    with start_server(spec, log=log) as process:
        process.wait_until_healthy(300)
        yield Server(process.url, log)


def test_a_live_server_learns(
    server: Server, learner: Learner, tiny_target: Path, tmp_path: Path
) -> None:
    reference = ReferenceModel(tiny_target)
    expected = [reference.greedy(prompt, LENGTH) for prompt in PROMPTS]

    def serve_all() -> float:
        """Committed tokens per target pass over all prompts, whose outputs are checked."""
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: generate(server, prompt), PROMPTS))
        assert [answer["output_ids"] for answer in answers] == expected
        passes = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        return len(PROMPTS) * (LENGTH - 1) / passes

    def serve_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, learner.log()[-4000:]
            serve_all()
            time.sleep(0.5)  # the learner needs a share of the cores

    static = serve_all()  # nobody listens yet
    learner.start()
    serve_until(lambda: len(swaps(server)) > 0)
    learner.end(signal.SIGKILL)
    published = VersionStore(tmp_path / "store").current().number
    serve_all()
    learner.start()
    serve_until(lambda: swaps(server)[-1][1] > published)
    assert learner.end(signal.SIGTERM) == 0
    assert serve_all() > 1.2 * static
    wait_for(lambda: "is served as published" in server.log())

    # A version that should never have been published.
    good = swaps(server)[-1][1]
    serve_until(lambda: f"version {good} stays" in server.log())
    writer = open_writer(tmp_path / "store", learner.drafter)
    bad = publish(writer, learner.drafter)
    writer.close()
    serve_until(lambda: f"rolled back from version {bad} to {good}" in server.log())
    assert serve_all() > 1.2 * static
    notice = rollback_notice(tmp_path / "channel", writer.lineage)
    assert (notice.version, notice.restored) == (bad, good)
    assert "committed tokens per pass" in notice.reason

    assert "not the published ones" not in server.log()
    assert "Traceback" not in server.log()
    wait_for(lambda: metric(server, "adaspec_live_version") == good)
    assert metric(server, "adaspec_swaps_total", version=str(good), cause="rollback") == 1
    wait_for(lambda: metric(server, "adaspec_swap_pause_seconds_count") == len(swaps(server)))
    wait_for(lambda: metric(server, "adaspec_committed_tokens_total", version=str(good)) > 0)
    assert metric(server, "adaspec_feedback_records_total", outcome="sent") > 0


def test_a_swap_equals_a_cold_start(tiny_target: Path, tmp_path: Path) -> None:
    drafter = write_fitted_drafter(tmp_path / "drafter", tiny_target, PROMPTS[:4])
    writer = open_writer(tmp_path / "store", drafter)
    config = write_server_config(tmp_path, refresh_share=0.0)

    def swap(server: Server) -> None:
        publish(writer, drafter)
        # A version goes live before a step, so there must be steps.
        wait_for(lambda: bool(generate(server, [77, 78]) and swaps(server)))
        assert swaps(server) == [(0, 1)]

    swapped, cached = record(tiny_target, drafter, tmp_path / "swapped", config, swap)
    assert cached == 0  # the prefix of the other context is not reused
    cold, cached = record(tiny_target, writer.path(1), tmp_path / "cold", config, lambda _: None)
    assert cached > 0
    writer.close()
    assert [step.request for step in swapped] == [step.request for step in cold]
    for ours, theirs in zip(swapped, cold, strict=True):
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.drafted, theirs.drafted)


def rollback_notice(channel: Path, lineage: str) -> RollbackRecord:
    """The next roll-back that the server tells the learner, in whose place we listen."""
    receiver = FeedbackReceiver(open_channel(channel).feedback, lineage)
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            record = receiver.receive(1.0)
            if isinstance(record, RollbackRecord):
                return record
    finally:
        receiver.close()
    raise AssertionError("no roll-back was told")


def publish(writer: VersionWriter, drafter: Path) -> int:
    """A version with all weights changed a little, those of the context too."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: t + 0.02 * torch.randn(t.shape, generator=generator)
        for name, t in read_tensors(drafter).items()
    }
    provenance = Provenance(
        parent=0, mode="full", objective="", optimiser="", steps=1, tokens_seen=1, gate=None
    )
    number = writer.add(tensors, provenance).number
    writer.point(number, "published by a test")
    return number


def record(
    target: Path, drafter: Path, directory: Path, config: Path, change: Callable[[Server], None]
) -> tuple[list[DraftPass], int]:
    """Every draft pass of a few requests after a change of the running server, and the tokens of
    an earlier request that the first of them found in the prefix cache.
    """
    records = directory / "records"
    records.mkdir(parents=True)
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        config=config,
        extra=("--skip-server-warmup",),
        environment={RECORDS_VARIABLE: str(records)},
    )
    log = directory / "server.log"
    with start_server(spec, log=log, command=command(spec, RECORDER)) as process:
        process.wait_until_healthy(300)
        server = Server(process.url, log)
        generate(server, PROMPTS[0], "before")
        change(server)
        cached = generate(server, PROMPTS[0], "after")["meta_info"]["cached_tokens"]
        server.flush_cache()
        for i, prompt in enumerate(PROMPTS[:4]):
            generate(server, prompt, f"recorded-{i}")
    return [step for step in read_passes(records) if "recorded" in step.request[0]], cached
