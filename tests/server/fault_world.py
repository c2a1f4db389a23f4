"""A live server whose learners are broken by tests, and the traffic that must not notice."""

from dataclasses import dataclass, field
from pathlib import Path

from adaspec.feedback import Channel
from adaspec.versions import Pointer, VersionStore, lineage_of
from online.state import load_state
from tests.server.checked_traffic import CheckedTraffic
from tests.server.forked_learner import ForkedLearner, Statuses
from tests.server.launch import Server
from tests.server.online_loop import swaps

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
    server: Server
    traffic: CheckedTraffic
    statuses: Statuses
    learners: list[ForkedLearner] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def lineage(self) -> str:
        return lineage_of(self.drafter)

    def start_learner(self, nan_steps: tuple[int, int] | None = None) -> ForkedLearner:
        config = self.directory / "learn.toml"
        config.write_text(LEARNER)
        options = {"drafter": self.drafter, "target": self.target, "config": config}
        options |= {"store": self.store, "channel": self.directory / "channel"}
        log = self.directory / f"learner-{len(self.learners)}.log"
        self.learners.append(ForkedLearner(log, options, nan_steps))
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
