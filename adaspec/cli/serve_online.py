"""`adaspec serve --online`: a learner beside the server, and the channel between them."""

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adaspec.config import AdaSpecConfig, write_config
from adaspec.errors import AdaSpecError
from adaspec.target.smollm2 import cache_directory

_STOP_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class OnlinePlan:
    """A learner ready to be started.

    Attributes:
        config: the server's configuration, completed and written to a file.
        command: the learner's.
        sentences: what the user should know.
    """

    config: Path
    command: tuple[str, ...]
    sentences: tuple[str, ...]


def plan_online(
    config: AdaSpecConfig, drafter: Path, target: str, learn_config: Path | None, port: int
) -> OnlinePlan:
    """Complete the configuration and describe the learner.

    Sockets and versions lie in the cache directory, under the drafter's lineage, so that a server
    that is started again goes on with what was learned; what the configuration names instead is
    kept.

    Raises:
        AdaSpecError: if the target is not a local directory, a file cannot be written, or the
            channel cannot be used.
    """
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.feedback import open_channel
    from adaspec.versions import lineage_of

    if not Path(target).is_dir():
        raise AdaSpecError(
            f"--online reads the embeddings of the target, and {target} is no local directory; "
            "download it and give its directory with --target."
        )
    home = cache_directory() / "online" / lineage_of(drafter)
    given = config.channel
    channel = msgspec.structs.replace(
        given,
        directory=given.directory or str(home / "channel"),
        store=given.store or str(home / "store"),
    )
    completed = msgspec.structs.replace(
        config, tap=msgspec.structs.replace(config.tap, enabled=True), channel=channel
    )
    file = home / f"serve-{port}.toml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_config(completed, file)
    except OSError as error:
        raise AdaSpecError(
            f"cannot write {file} ({error.strerror}); set ADASPEC_CACHE to a directory you can "
            "write to."
        ) from error
    open_channel(Path(str(channel.directory)))
    command = [sys.executable, "-m", "online", "--drafter", str(drafter), "--target", target]
    command += ["--store", str(channel.store), "--channel", str(channel.directory)]
    if learn_config is not None:
        command += ["--config", str(learn_config)]
    return OnlinePlan(
        config=file,
        command=tuple(command),
        sentences=(f"Learner: versions go to {channel.store}",),
    )


class LearnerProcess:
    """A learner started beside a server; the server does not depend on it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._told = False

    def news(self) -> str | None:
        """One sentence, once, if the learner has failed."""
        code = self._process.poll()
        if not code or self._told:
            return None
        self._told = True
        return (
            f"The learner has ended with code {code} (its log says why); the server goes on with "
            "the version it has."
        )

    def stop(self) -> None:
        """Ask it to save its state and leave; kill it if it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_GRACE_S)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def running_learner(command: tuple[str, ...], log: Path | None) -> Iterator[LearnerProcess]:
    """A learner for the length of a ``with`` block.

    Args:
        command: `OnlinePlan.command`.
        log: file that receives its output; ``None`` for the terminal.
    """
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        learner = LearnerProcess(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                preexec_fn=_end_with_parent,
            )
        )
        stack.callback(learner.stop)
        yield learner


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
