"""A live server whose learners are broken by tests, and the traffic that must not notice."""

import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from adaspec.feedback import Channel, open_channel
from adaspec.load.launch import ServerProcess, ServerSpec, free_port, start_server
from adaspec.versions import (
    Announcer,
    Pointer,
    VersionStore,
    VersionWriter,
    lineage_of,
    open_writer,
)
from online.state import load_state
from tests.server import fault_report, tiny_models
from tests.server.checked_traffic import CheckedTraffic, greedy_continuations
from tests.server.forked_learner import ForkedLearner, Harm, Statuses
from tests.server.instrumented import command
from tests.server.launch import Server
from tests.server.online_loop import add_version, refusals, swaps, wait_for, write_server_config
from tests.server.troubled import TROUBLES_VARIABLE, Troubles

LENGTH = 24
QUEUE_BYTES = 4 << 20
# Publishes every second or so: any improvement will do.
LEARNER = """\
status_seconds = 0.05
save_seconds = 0.3
[process]
nice = 0
[replay]
held_back = 0.3
fresh = 4
[batch]
trajectories = 2
blocks = 12
passes = 1000.0
[optimiser]
learning_rate = 1e-3
[gate]
every_steps = 10
min_requests = 4
max_requests = 12
passes = 4
tolerance = 1.0
"""


@dataclass
class World:
    """A server under checked traffic, and what learners need."""

    directory: Path
    drafter: Path
    target: Path
    channel: Channel
    spec: ServerSpec
    module: str
    troubles: Troubles
    learners: list[ForkedLearner] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    server: Server = field(init=False)
    process: ServerProcess = field(init=False)
    traffic: CheckedTraffic = field(init=False)
    statuses: Statuses = field(init=False)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def troubles_file(self) -> Path:
        return self.directory / "troubles"

    @property
    def lineage(self) -> str:
        return lineage_of(self.drafter)

    def fault(self, name: str) -> AbstractContextManager[fault_report.Fault]:
        """Report a kind of fault, and fail if it cost the traffic anything."""
        return fault_report.fault(name, self.traffic)

    def start_learner(self, harm: Harm | None = None) -> ForkedLearner:
        config = self.directory / "learn.toml"
        config.write_text(LEARNER)
        options = {"drafter": self.drafter, "target": self.target, "config": config}
        options |= {"store": self.store, "channel": self.directory / "channel"}
        log = self.directory / f"learner-{len(self.learners)}.log"
        self.learners.append(ForkedLearner(log, options, harm))
        return self.learners[-1]

    def served(self) -> int:
        """Number of the version on the server."""
        return next((after for _, after in reversed(swaps(self.server))), 0)

    def live(self) -> Pointer:
        """The version that the store calls live, which passes every check."""
        store = VersionStore(self.store)
        pointer = store.current()
        store.stage(pointer.number)
        return pointer

    def saved_steps(self) -> int:
        saved = load_state(self.store / "learner", self.lineage, "frozen-kv")
        return saved.state.steps if saved else 0

    def end_learners(self) -> None:
        for learner in self.learners:
            learner.close()

    def calm(self) -> None:
        """End the learners, and put clock and disk right."""
        self.end_learners()
        self.troubles.clock_s = self.troubles.disk_s = 0.0

    def kill_server(self) -> None:
        """SIGKILL to every process of the server."""
        self.process.process.send_signal(signal.SIGKILL)
        self.process.stop()

    def start_server(self) -> None:
        """Start it on the address that it had."""
        log = self.directory / f"server-{len(self.logs)}.log"
        self.logs.append(log)
        self.process = start_server(self.spec, log=log, command=command(self.spec, self.module))
        self.process.wait_until_healthy(300)
        self.server = Server(self.process.url, log)


@dataclass
class Publisher:
    """Publishes in the learner's place, good versions and bad ones."""

    world: World
    writer: VersionWriter
    announcer: Announcer
    published: int = 0

    def publish(self) -> int:
        """Make a new good version live."""
        self.published += 1
        number = add_version(self.writer, self.world.drafter, seed=self.published)
        self.announcer.announce(self.writer.point(number, "good"))
        return number

    def publish_and_wait(self) -> int:
        """Make a new good version live, and wait until it is served."""
        number = self.publish()
        wait_for(lambda: self.world.served() == number)
        return number

    def point(self, number: int, **changes: object) -> Pointer:
        """Make any version live, as nobody but a careless user would."""
        current = self.writer.current()
        default = {"sequence": current.sequence + 1, "number": number}
        pointer = msgspec.structs.replace(current, **{**default, **changes})
        self.write_pointer(msgspec.json.encode(pointer))
        return pointer

    def write_pointer(self, content: bytes) -> None:
        """Put anything in the pointer's place, and say that there is something to read."""
        fresh = self.world.store / "fresh"
        fresh.write_bytes(content)
        fresh.rename(self.world.store / "CURRENT")
        self.announcer.announce(self._any_pointer())

    def _any_pointer(self) -> Pointer:
        base = self.writer.base
        return Pointer(
            lineage=base.lineage, sequence=0, number=0, sha256=base.sha256, reason="look there"
        )


@contextmanager
def publishing(world: World) -> Iterator[Publisher]:
    """A publisher for the length of a ``with`` block, which no learner may outlast."""
    writer, announcer = open_writer(world.store, world.drafter), Announcer(world.channel.versions)
    try:
        yield Publisher(world, writer, announcer, published=max(writer.numbers()))
    finally:
        announcer.close()
        writer.close()


def process_of(world: World, word: str) -> psutil.Process | None:
    """The server's process that has a word in its command line or title."""
    for process in psutil.Process(world.process.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(process.cmdline()):
                return process
    return None


def published_and_served(world: World, learner: ForkedLearner, after: int) -> None:
    """Wait until the learner has published a version newer than this, and the server runs it."""
    world.statuses.wait(learner, lambda status: status.live_version > after)
    wait_for(lambda: world.served() > after)


def wait_for_refusal(world: World, before: int, reason: str) -> None:
    """Until the server has refused once more than ``before``, and why."""
    wait_for(lambda: len(refusals(world.server)) > before)
    assert reason in refusals(world.server)[-1]


@dataclass(frozen=True)
class Load:
    """Of the traffic.

    Attributes:
        prompts: different ones.
        shared, own: tokens that every eighth prompt begins with alike, and those behind them.
        tokens: of each answer.
        in_flight: requests at one time.
    """

    prompts: int = 48
    shared: int = 0
    own: int = 6
    tokens: int = LENGTH
    in_flight: int = 3

    def draw(self) -> list[list[int]]:
        """The prompts."""
        draw = random.Random(0)

        def some(count: int) -> list[int]:
            return [draw.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(count)]

        beginnings = [some(self.shared) for _ in range(8)]
        return [beginnings[i % 8] + some(self.own) for i in range(self.prompts)]


@contextmanager
def running_world(
    target: Path,
    drafter: Path,
    directory: Path,
    *arguments: str,
    load: Load = Load(),
    module: str = "tests.server.troubled",
) -> Iterator[World]:
    """A server that can be troubled, under traffic.

    Args:
        arguments: further ones of the server's command line.
        module: main one of the server's processes.
    """
    config = write_server_config(directory, refresh_share=0.5, more="[watch]\nwindow_tokens = 0\n")
    config.write_text(
        config.read_text().replace("[tap]\n", f"[tap]\nqueue_bytes = {QUEUE_BYTES}\n")
    )
    troubles = Troubles.make(directory / "troubles")
    spec = ServerSpec(
        target=str(target),
        port=free_port(),
        drafter=str(drafter),
        dtype="float32",
        config=config,
        extra=("--enable-metrics", *arguments),
        environment={TROUBLES_VARIABLE: str(directory / "troubles")},
    )
    prompts = load.draw()
    expected = greedy_continuations(target, prompts, load.tokens)
    channel = open_channel(directory / "channel")
    world = World(directory, drafter, target, channel, spec, module, troubles)
    world.start_server()
    traffic = world.traffic = CheckedTraffic(world.server, prompts, expected, load.in_flight)
    world.statuses = Statuses(channel)
    try:
        yield world
        traffic.close()
        assert traffic.failures == []
        for log in world.logs:
            text = log.read_text(errors="replace")
            assert "Traceback" not in text
            assert "not the published ones" not in text
            assert "leak" not in text
    finally:
        traffic.close()
        world.end_learners()
        world.statuses.close()
        world.process.stop()
