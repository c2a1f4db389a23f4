"""The thread that receives feedback, puts requests together and fills the replay buffer."""

import threading
from collections import deque

from adaspec.feedback import FeedbackReceiver, RollbackRecord
from online.assembly import Assembler
from online.replay import ReplayBuffer

_POLL_SECONDS = 0.1


class Intake:
    """Runs until closed.

    Args:
        receiver: closed with the intake.
    """

    def __init__(
        self, receiver: FeedbackReceiver, assembler: Assembler, replay: ReplayBuffer
    ) -> None:
        self._receiver = receiver
        self._assembler = assembler
        self._replay = replay
        self._rollbacks: deque[RollbackRecord] = deque()
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaspec-intake", daemon=True)
        self._thread.start()

    def take_rollback(self) -> RollbackRecord | None:
        """The oldest notice not taken yet.

        Raises:
            Exception: whatever ended the thread.
        """
        if self._failure is not None:
            raise self._failure
        return self._rollbacks.popleft() if self._rollbacks else None

    def counters(self) -> dict[str, int]:
        """Counters of receiver and assembler, by name."""
        stats = self._receiver.stats()
        return {
            "received": stats.received,
            "received-bytes": stats.received_bytes,
            "malformed": stats.malformed,
            "foreign": stats.foreign,
            **self._assembler.counters,
        }

    def close(self) -> None:
        """Stop receiving."""
        self._stop.set()
        self._thread.join()
        self._receiver.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                record = self._receiver.receive(_POLL_SECONDS)
                if isinstance(record, RollbackRecord):
                    self._rollbacks.append(record)
                elif record is not None:
                    for trajectory in self._assembler.add(record):
                        self._replay.add(trajectory)
        except Exception as error:
            self._failure = error
