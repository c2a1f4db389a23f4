"""The whole loop over real sockets: a simulated server's feedback in, published versions out."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from adaspec.control import Pause, Pin, Resume, RollBack, Unpin, ask
from adaspec.drafters.checkpoint import load_drafter, save_drafter
from adaspec.drafters.network import BlockDrafter
from adaspec.feedback import Channel, FeedbackCollector, FeedbackSender, in_share, open_channel
from adaspec.versions import (
    LearnerStatus,
    StatusListener,
    VersionFollower,
    VersionStore,
    is_context_weight,
    lineage_of,
    open_writer,
)
from adaspec.versions import writer as writer_module
from online.config import (
    BatchSection,
    GateSection,
    LearnConfig,
    OptimiserSection,
    ReplaySection,
)
from online.learner import Learner
from online.publisher import Decision
from online.shadow import walk
from online.target import TargetMatrices
from tests.online.world import DRAFTER, Request, TinyTarget, captures, random_prompt
from tests.versions.test_store import PROVENANCE

CONFIG = LearnConfig(
    status_seconds=0.05,
    save_seconds=0.5,
    replay=ReplaySection(held_back=0.4, fresh=2),
    batch=BatchSection(trajectories=4, blocks=12, passes=40.0),
    optimiser=OptimiserSection(learning_rate=3e-3),
    gate=GateSection(every_steps=15, min_requests=4, passes=8, keep_versions=2),
)


class Server:
    """A server that serves the same prompts again and again, and what it meets the learner with."""

    def __init__(self, directory: Path, drafter: Path, target: TinyTarget) -> None:
        self.drafter_directory = drafter
        self.store = directory / "store"
        self.channel: Channel = open_channel(directory / "channel")
        self.channel_directory = directory / "channel"
        self.lineage = lineage_of(drafter)
        self.collector = FeedbackCollector(FeedbackSender(self.channel.feedback), self.lineage)
        self.status = StatusListener(self.channel.status)
        generator = torch.Generator().manual_seed(3)
        prompts = {f"prompt-{i}": random_prompt(generator) for i in range(16)}
        self._target = target
        self._drafter = load_drafter(drafter, torch.float32)
        self._requests = target.requests(prompts, 24)
        self._names = itertools.count()

    def serve(self) -> list[Request]:
        """Serve all prompts once, under new request ids."""
        served = []
        for request in self._requests:
            named = Request(
                f"r{next(self._names)}",
                request.prompt_length,
                request.tokens,
                request.taps,
                request.hidden,
                request.logits,
            )
            for capture in captures(named, self._drafter, self._target):
                self.collector.submit(capture)
            served.append(named)
        return served

    def wait_for(
        self, condition: Callable[[LearnerStatus], bool], seconds: float = 90.0
    ) -> LearnerStatus:
        """Serve until the learner's status fulfils a condition."""
        deadline = time.monotonic() + seconds
        last: LearnerStatus | None = None
        next_serving = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() >= next_serving:
                self.serve()
                next_serving = time.monotonic() + 1.0
            status = self.status.poll(0.1)
            if status is not None:
                last = status
                if condition(status):
                    return status
        raise AssertionError(f"the condition did not come true; last status: {last}")

    def close(self) -> None:
        self.collector.close()
        self.status.close()


@pytest.fixture
def server(tmp_path: Path, target: TinyTarget) -> Iterator[Server]:
    torch.manual_seed(1)
    save_drafter(BlockDrafter(DRAFTER), tmp_path / "drafter")
    server = Server(tmp_path, tmp_path / "drafter", target)
    yield server
    server.close()


@pytest.fixture
def learner(server: Server, target_directory: Path) -> Iterator[Learner]:
    with learning(server, target_directory) as learner:
        yield learner


@contextmanager
def learning(server: Server, target_directory: Path) -> Iterator[Learner]:
    """A learner that runs in a thread."""
    learner = Learner(
        server.drafter_directory, target_directory, server.store, server.channel, CONFIG
    )
    stop = threading.Event()
    thread = threading.Thread(target=learner.run, args=(stop,))
    thread.start()
    yield learner
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def decisions(server: Server) -> list[Decision]:
    lines = (server.store / "decisions.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Decision) for line in lines]


def test_feedback_becomes_a_better_version_on_the_server(
    server: Server, learner: Learner, matrices: TargetMatrices
) -> None:
    follower = VersionFollower(server.store, server.channel.versions, server.lineage)
    status = server.wait_for(lambda s: s.published >= 1 and s.kept + s.published >= 2)
    assert status.steps >= CONFIG.gate.every_steps
    assert status.tokens_seen > 0
    assert status.feedback["completed"] > 0
    assert status.feedback["malformed"] == status.feedback["foreign"] == 0

    logged = decisions(server)
    first = next(d for d in logged if d.verdict and d.verdict.action == "publish")
    assert first.verdict is not None
    assert first.verdict.over_incumbent.estimate > 0
    assert first.verdict.candidate > first.verdict.incumbent
    assert len(logged) >= 2

    store = VersionStore(server.store)
    pointer = store.current()
    manifest = store.manifest(pointer.number)
    assert manifest.provenance.gate is not None
    assert manifest.provenance.mode == "frozen-kv"
    assert manifest.context_sha256 == store.base.context_sha256
    staged, base = store.stage(pointer.number).tensors, store.stage(0).tensors
    assert all(torch.equal(staged[n], base[n]) for n in base if is_context_weight(n))
    assert any(not torch.equal(staged[n], base[n]) for n in base)

    deadline = time.monotonic() + 20
    arrival = None
    while arrival is None or arrival.pointer.number == 0:
        arrival = follower.take() or arrival
        assert time.monotonic() < deadline
        time.sleep(0.01)
    follower.close()


def test_the_published_version_drafts_better_by_an_outside_measure(
    server: Server, learner: Learner, matrices: TargetMatrices, trajectories: list
) -> None:
    """Fresh requests of the same target, which the learner has never seen."""
    server.wait_for(lambda s: s.published >= 1)
    store = VersionStore(server.store)
    number = store.current().number
    rates = []
    for version in (0, number):
        drafter = load_drafter(store.path(version), torch.float32)
        walks = walk(drafter, matrices, trajectories, 100, 4096)
        rates.append(sum(w.committed for w in walks) / sum(w.passes for w in walks))
    assert rates[1] > rates[0]


def test_a_full_disk_fails_publications_and_nothing_else(
    server: Server, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module, "save_file", full)
    status = server.wait_for(lambda s: s.failures >= 1)
    assert (status.published, status.live_version) == (0, 0)
    assert VersionStore(server.store).numbers() == [0]
    monkeypatch.undo()
    assert server.wait_for(lambda s: s.published >= 1).live_version >= 1


def test_weights_that_broke_are_given_up(server: Server, learner: Learner) -> None:
    server.wait_for(lambda s: s.steps > 0)
    with torch.no_grad():
        learner._trainer.drafter.norm.weight.fill_(float("nan"))
    broken = server.wait_for(lambda s: s.skipped_steps > 0)
    server.wait_for(lambda s: s.steps > broken.steps)
    assert all(bool(p.isfinite().all()) for p in learner._trainer.drafter.parameters())
    assert "training starts again" in next(d.note for d in decisions(server) if d.verdict is None)


def test_a_damaged_state_does_not_keep_a_learner_from_starting(
    server: Server, target_directory: Path
) -> None:
    def start() -> Learner:
        return Learner(
            server.drafter_directory, target_directory, server.store, server.channel, CONFIG
        )

    first = start()
    first._trainer.steps = 7
    first._trainer.drafter.norm.weight.data.fill_(float("nan"))
    first._save()
    first.close()
    second = start()
    assert second._trainer.steps == 7
    assert all(bool(p.isfinite().all()) for p in second._trainer.drafter.parameters())
    second.close()


def test_learning_goes_on_from_a_version_with_context_weights_of_its_own(
    server: Server, target_directory: Path
) -> None:
    writer = open_writer(server.store, server.drafter_directory)
    weights = {name: 1.01 * tensor for name, tensor in writer.stage(0).tensors.items()}
    provenance = msgspec.structs.replace(PROVENANCE, mode="full")
    writer.point(writer.add(weights, provenance).number, "an operator's")
    writer.close()

    for published in (1, 2):  # the second time from a saved state
        with learning(server, target_directory):
            server.wait_for(lambda s, n=published: s.published >= n)
        live = (store := VersionStore(server.store)).stage(store.current().number)
        assert live.manifest.provenance.mode == "full"
        kept = {n for n in weights if torch.equal(live.tensors[n], weights[n])}
        assert {n for n in weights if is_context_weight(n)} <= kept < weights.keys()


def test_a_server_that_rolls_back_is_followed(server: Server, learner: Learner) -> None:
    def complain(status: LearnerStatus) -> bool:
        """About whatever is live: a newer version may have been published in between."""
        if status.live_version and not status.rolled_back:
            server.collector.report_rollback(
                status.live_version, 0, "live acceptance fell from 2.0 to 1.2"
            )
        return status.rolled_back >= 1

    server.wait_for(complain)
    entry = next(d for d in decisions(server) if d.verdict is None)
    assert "live acceptance fell" in entry.note
    assert entry.live.number == 0
    assert entry.live.sequence > 1


def test_a_version_that_the_server_refuses_is_taken_back(server: Server, learner: Learner) -> None:
    def refuse(status: LearnerStatus) -> bool:
        if status.live_version and not status.rolled_back:
            server.collector.report_rollback(status.live_version, 0, "no memory left", "refusal")
        return status.rolled_back >= 1

    server.wait_for(refuse)
    entry = next(d for d in decisions(server) if d.verdict is None)
    assert re.fullmatch(r"the server refused version \d+ for 0: no memory left", entry.note)
    assert entry.live.number == 0


class Process:
    """The learner as its own process."""

    def __init__(self, server: Server, target: Path, config: Path) -> None:
        arguments = {
            "drafter": server.drafter_directory,
            "target": target,
            "store": server.store,
            "channel": server.channel_directory,
            "config": config,
        }
        command = [sys.executable, "-m", "online"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def write_config(path: Path) -> Path:
    path.write_text(
        "status_seconds = 0.02\nsave_seconds = 0.3\n"
        "[process]\nnice = 0\n"
        "[replay]\nheld_back = 0.4\nfresh = 2\n"
        "[batch]\ntrajectories = 4\nblocks = 12\npasses = 40.0\n"
        "[optimiser]\nlearning_rate = 3e-3\n"
        "[gate]\nevery_steps = 15\nmin_requests = 4\npasses = 8\n"
    )
    return path


def test_a_killed_learner_loses_nothing_and_a_stopped_one_leaves_cleanly(
    server: Server, target_directory: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "learn.toml")
    first = Process(server, target_directory, config)
    try:
        published = server.wait_for(lambda s: s.published >= 1)
        server.wait_for(lambda s: s.activity == "judging")  # next comes a publication, perhaps
    finally:
        assert first.end(signal.SIGKILL) == -signal.SIGKILL

    store = VersionStore(server.store)
    pointer = store.current()
    assert pointer.sequence >= published.sequence
    for number in store.numbers():
        store.stage(number)

    server.status.poll()  # what the dead process had sent
    second = Process(server, target_directory, config)
    try:
        resumed = server.wait_for(lambda s: s.process == second.process.pid and s.steps > 0)
        assert resumed.published >= 1
        assert resumed.sequence >= pointer.sequence
        further = server.wait_for(
            lambda s: s.process == second.process.pid and s.steps > resumed.steps
        )
        assert further.tokens_seen > resumed.tokens_seen
    finally:
        assert second.end(signal.SIGTERM) == 0
    states = list((server.store / "learner").iterdir())
    assert len(states) == 1


def test_a_mistake_of_the_user_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[gate]\nconfidense = 0.5\n")
    process = subprocess.run(
        [
            *(sys.executable, "-m", "adaspec.cli.main", "learn"),
            *("--drafter", server.drafter_directory, "--target", tmp_path),
            *("--store", tmp_path / "s", "--channel", tmp_path / "channel"),
            *("--config", tmp_path / "bad.toml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 2
    assert "confidense" in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1


def test_names_fall_into_both_pools() -> None:
    held = [in_share(f"r{i}", CONFIG.replay.held_back, "held-back") for i in range(16)]
    assert 0 < sum(held) < 16


def test_an_operator_pauses_pins_and_rolls_back(server: Server, learner: Learner) -> None:
    channel = server.channel
    server.wait_for(lambda s: s.published >= 1)
    assert "learning is paused" in ask(channel, Pause())
    paused = server.wait_for(lambda s: s.activity == "paused")
    later = server.wait_for(lambda s: s.time > paused.time + 1.0)
    assert (later.steps, later.feedback["completed"] > paused.feedback["completed"]) == (
        paused.steps,
        True,
    )
    assert "rolled back to version 0" in ask(channel, RollBack(version=0))
    assert VersionStore(server.store).current().number == 0
    ask(channel, Pin())
    ask(channel, Resume())
    enough = paused.steps + 2 * CONFIG.gate.every_steps
    trained = server.wait_for(lambda s: s.steps > enough)
    assert (trained.live_version, trained.pinned) == (0, 0)
    assert trained.published == paused.published
    ask(channel, Unpin())
    server.wait_for(lambda s: s.kept + s.published > paused.kept + paused.published)
