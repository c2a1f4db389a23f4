"""Versions ready to be swapped in: watched for, read and checked on a thread of their own."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.feedback.keys import ServerKeys, read_keys
from adaspec.feedback.sockets import Endpoint
from adaspec.versions.announce import VersionWatcher
from adaspec.versions.manifest import Pointer
from adaspec.versions.store import StagedVersion, VersionStore

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Arrival:
    """A version that became live and passed every check."""

    pointer: Pointer
    version: StagedVersion


@dataclass(frozen=True)
class Refusal:
    """A version that became live but cannot be used.

    Attributes:
        number: of the version.
        reason: one sentence.
    """

    number: int
    reason: str


class VersionFollower:
    """Follows a store's pointer and keeps the newest checked version until it is taken.

    A version that cannot be staged is logged and skipped: the server goes on with what it has.

    Args:
        store: directory of the version store, which may not exist yet.
        endpoint: where the learner announces; with keys, only versions that it has signed are
            followed.
        lineage: of the drafter the server started with.
        prepare: called on the follower's thread with each staged version, for instance to copy it
            to the GPU; if it raises, the version is skipped.

    Raises:
        AdaSpecError: if the endpoint cannot be used, or its keys are not a server's.
    """

    def __init__(
        self,
        store: Path,
        endpoint: Endpoint,
        lineage: str,
        prepare: Callable[[StagedVersion], StagedVersion] = lambda version: version,
    ) -> None:
        self._directory = store
        self._prepare = prepare
        self._signer: str | None = None
        if endpoint.keys is not None:
            self._signer = read_keys(Path(endpoint.keys), ServerKeys).signer
        self._watcher = VersionWatcher(store, endpoint, lineage)
        # A deque of one hands over atomically: a newer arrival replaces one not yet taken.
        self._arrivals: deque[Arrival] = deque(maxlen=1)
        self._refusals: deque[Refusal] = deque(maxlen=1)
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaspec-versions", daemon=True)
        self._thread.start()

    def take(self) -> Arrival | None:
        """The newest version since the last call, or None; never waits."""
        return self._arrivals.popleft() if self._arrivals else None

    def take_refusal(self) -> Refusal | None:
        """The newest refusal since the last call, or None; never waits."""
        return self._refusals.popleft() if self._refusals else None

    def stage(self, number: int) -> StagedVersion:
        """Read and check a version, as those that become live are; any thread.

        Raises:
            AdaSpecError: if it cannot be used.
        """
        return VersionStore(self._directory, self._signer).stage(number)

    @property
    def failures(self) -> int:
        """Versions that could not be staged."""
        return self._failures

    def close(self, timeout: float = 2.0) -> None:
        """Stop following; waits ``timeout`` seconds at most."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pointer = self._watcher.poll(_POLL_SECONDS)
                if pointer is not None:
                    self._follow(pointer)
            except AdaSpecError as error:
                self._failures += 1
                logger.warning("a drafter version was not loaded: %s", error)
            except Exception:
                # Whatever is wrong with a version must not end the following of later ones.
                self._failures += 1
                logger.exception("a drafter version was not loaded")
        self._watcher.close()

    def _follow(self, pointer: Pointer) -> None:
        try:
            version = self.stage(pointer.number)
            self._arrivals.append(Arrival(pointer, self._prepare(version)))
        except Exception as error:
            self._refusals.append(Refusal(pointer.number, str(error) or repr(error)))
            raise
