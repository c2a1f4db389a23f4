"""Learners that die, hang, and come back; stand-ins, since what they learn does not matter here."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from adaspec.cli import learner_keeper
from adaspec.cli.learner_keeper import LearnerKeeper, Patience
from adaspec.feedback import Endpoint
from adaspec.versions import LearnerStatus, StatusPublisher

DYING = "import sys; print('on its way'); sys.exit('luck ran out')"
HANGING = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
OBEYING = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\n"
    "print('pid', os.getpid(), flush=True); time.sleep(600)"
)
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('pid', os.getpid(), flush=True); time.sleep(600)"
)
FAST = Patience(silence=60.0, first_pause=0.05, longest_pause=0.15, settled=60.0)


class Kept:
    """A keeper of a script, what it said and what the script wrote."""

    def __init__(self, directory: Path) -> None:
        self.status = Endpoint(f"ipc://{directory}/status.sock")
        self.log = directory / "learner.log"
        self.said: list[str] = []

    @contextmanager
    def keeping(self, *command: str, patience: Patience = FAST) -> Iterator[LearnerKeeper]:
        with LearnerKeeper(command, self.status, self.log, self.said.append, patience) as keeper:
            yield keeper

    def script(self, code: str, patience: Patience = FAST) -> AbstractContextManager[LearnerKeeper]:
        return self.keeping(sys.executable, "-c", code, patience=patience)

    def pids(self) -> list[int]:
        """Process ids that the scripts have written."""
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.log.read_text())]


@pytest.fixture
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("c"))  # short enough for a socket


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def status_of(process: int) -> LearnerStatus:
    counts = ("live_version", "sequence", "steps", "skipped_steps", "tokens_seen", "published")
    counts += ("kept", "rolled_back", "failures", "replay_trajectories", "replay_bytes")
    numbers = ("loss", "cross_entropy", "divergence", "accuracy", "verdict")
    return LearnerStatus(
        lineage="0" * 16,
        time=0.0,
        process=process,
        activity="waiting",
        learning_seconds=0.0,
        held_back=0,
        feedback={},
        **dict.fromkeys(counts, 0),
        **dict.fromkeys(numbers),
    )


def test_a_learner_that_dies_is_started_again_and_again(kept: Kept) -> None:
    with kept.script(DYING):
        wait_for(lambda: len(kept.said) >= 4)
    assert all("has ended with code 1" in sentence for sentence in kept.said)
    assert all(f"({kept.log}): luck ran out" in sentence for sentence in kept.said)
    pauses = [float(re.search(r"again in ([\d.]+) s", s)[1]) for s in kept.said[:4]]
    assert pauses == [0.05, 0.1, 0.15, 0.15]
    assert kept.log.read_text().count("on its way") == len(kept.said)


def test_a_life_long_enough_forgets_the_deaths_before(kept: Kept) -> None:
    patience = Patience(silence=60.0, first_pause=0.05, longest_pause=5.0, settled=0.0)
    with kept.script(DYING, patience):
        wait_for(lambda: len(kept.said) >= 3)
    assert all("again in 0.05 s" in sentence for sentence in kept.said)


def test_words_of_an_earlier_life_are_not_repeated(kept: Kept, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import os, sys\nif not os.path.exists({str(mark)!r}):\n"
    code += f"    open({str(mark)!r}, 'w'); sys.exit('the first time')\nos._exit(7)"
    with kept.script(code):
        wait_for(lambda: len(kept.said) >= 2)
    assert kept.said[0].endswith("the first time")
    assert "has ended with code 7" in kept.said[1]
    assert kept.said[1].endswith(f"({kept.log}): none")


def test_a_learner_that_hangs_is_killed_and_gets_more_time(kept: Kept) -> None:
    patience = Patience(silence=0.5, first_pause=0.05)
    with kept.script(HANGING, patience):
        wait_for(lambda: len(kept.said) >= 2)
    assert "given no sign of life for 0.5 s, was killed and is started again" in kept.said[0]
    assert "for 1 s" in kept.said[1]
    first, second, *_ = kept.pids()
    assert first != second
    assert not psutil.pid_exists(first)


def test_statuses_of_the_learner_itself_keep_it_alive(kept: Kept) -> None:
    publisher = StatusPublisher(kept.status)
    told, stop = [0], threading.Event()

    def publish() -> None:
        while not stop.wait(0.05):
            publisher.publish(status_of(told[0]))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        with kept.script(HANGING, Patience(silence=2.0, first_pause=0.05)):
            wait_for(lambda: kept.log.exists() and kept.pids())
            told[0] = kept.pids()[0]
            time.sleep(4.0)
            assert kept.said == []
            told[0] = os.getpid()  # somebody else's
            wait_for(lambda: kept.said)
            assert "no sign of life" in kept.said[0]
    finally:
        stop.set()
        thread.join()
        publisher.close()


def test_leaving_lets_the_learner_save(kept: Kept) -> None:
    with kept.script(OBEYING):
        wait_for(lambda: kept.log.exists() and kept.pids())
    assert kept.log.read_text().endswith("saved\n")
    assert kept.said == []


def test_a_learner_that_does_not_leave_is_killed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_keeper, "_STOP_GRACE_S", 0.2)
    with kept.script(STUBBORN) as keeper:
        wait_for(lambda: kept.log.exists() and kept.pids())
        keeper.ask_to_stop()
        wait_for(lambda: not psutil.pid_exists(kept.pids()[0]))
    assert kept.said == []


def test_a_command_that_is_not_there_is_tried_again(kept: Kept) -> None:
    with kept.keeping("/nowhere/python"):
        wait_for(lambda: len(kept.said) >= 2)
    assert "cannot be started (No such file or directory)" in kept.said[0]


def test_a_learner_is_asked_to_stop_when_its_keeper_dies(kept: Kept) -> None:
    """Kill -9 of the whole command: the kernel tells the learner."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from adaspec.cli.learner_keeper import LearnerKeeper, Patience\n"
        "from adaspec.feedback import Endpoint\n"
        f"command = (sys.executable, '-c', {OBEYING!r})\n"
        f"log = Path({str(kept.log)!r})\n"
        f"with LearnerKeeper(command, Endpoint({str(kept.status)!r}), log, print, Patience()):\n"
        "    time.sleep(600)"
    )
    process = psutil.Popen([sys.executable, "-c", code])
    wait_for(lambda: kept.log.exists() and kept.pids())
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    wait_for(lambda: kept.log.read_text().endswith("saved\n"))
