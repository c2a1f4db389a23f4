"""What an operator holds: a pause, a pinned version; and what is done at an operator's word."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from adaspec.control import (
    ControlDesk,
    Inquire,
    Pause,
    Pin,
    Publish,
    Request,
    Resume,
    RollBack,
    Unpin,
)
from adaspec.drafters.checkpoint import read_drafter_config, read_tensors
from adaspec.errors import AdaSpecError
from adaspec.files import replace_file
from adaspec.versions import BASE, Mode, Provenance, VersionWriter, context_digest
from adaspec.versions.manifest import VersionNumber
from online.publisher import Publisher

logger = logging.getLogger(__name__)

_FILE_NAME = "hold.json"


class Hold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What outlives a restart of the learner.

    Attributes:
        paused: nothing is trained or judged.
        pinned: version that stays live; None if the gate decides.
    """

    paused: bool = False
    pinned: VersionNumber | None = None


class Controls:
    """Carries out an operator's requests.

    Args:
        desk: where they come in.
        restart: makes training start again from the live version.
        decided: records a sentence in the decision log.

    Attributes:
        hold: what is held now.
        rolled_back: versions that an operator took back.
    """

    def __init__(
        self,
        desk: ControlDesk,
        writer: VersionWriter,
        publisher: Publisher,
        restart: Callable[[], None],
        decided: Callable[[str], None],
    ) -> None:
        self._desk = desk
        self._writer = writer
        self._publisher = publisher
        self._restart = restart
        self._decided = decided
        self._file = writer.directory / _FILE_NAME
        self.hold = _read(self._file)
        self.rolled_back = 0

    def serve(self) -> None:
        """Carry out the requests that wait."""
        self._desk.serve(self._act)

    def released(self, version: int) -> None:
        """The server gave up a version; a pin on it is void."""
        if self.hold.pinned == version:
            self._keep(Hold(paused=self.hold.paused))
            logger.warning("version %d is no longer pinned: the server gave it up", version)

    def close(self) -> None:
        """Release the address."""
        self._desk.close()

    def _act(self, request: Request) -> str:
        done = self._carry_out(request)
        if not isinstance(request, Inquire):
            self._decided(f"at an operator's word: {done}")
        return f"{done}; {self._state()}."

    def _carry_out(self, request: Request) -> str:
        hold = self.hold
        match request:
            case Inquire():
                return "nothing was changed"
            case Pause():
                self._keep(Hold(paused=True, pinned=hold.pinned))
                return "learning is paused"
            case Resume():
                self._keep(Hold(paused=False, pinned=hold.pinned))
                return "learning goes on"
            case RollBack(version=version):
                number = self._parent() if version is None else version
                self._make_live(number, "an operator rolled back to it")
                self.rolled_back += 1
                if hold.pinned is not None:
                    self._keep(Hold(paused=hold.paused, pinned=number))
                return f"rolled back to version {number}"
            case Pin(version=version):
                number = self._publisher.pointer.number if version is None else version
                # Written down first: a version that is made live and not pinned would not stay.
                self._keep(Hold(paused=hold.paused, pinned=number))
                try:
                    self._make_live(number, "an operator pinned it")
                except AdaSpecError:
                    self._keep(hold)
                    raise
                return f"version {number} is pinned"
            case Unpin():
                self._keep(Hold(paused=hold.paused))
                return "no version is pinned"
            case Publish(directory=directory):
                self._publish(Path(directory))
                number = self._publisher.pointer.number
                if hold.pinned is not None:
                    self._keep(Hold(paused=hold.paused, pinned=number))
                return f"{directory} was published as version {number}"

    def _parent(self) -> int:
        live = self._publisher.live.manifest
        if live.number == BASE:
            raise AdaSpecError("the base is live, and nothing is older; publish a version first.")
        parent = live.provenance.parent
        return BASE if parent is None or parent not in self._writer.numbers() else parent

    def _make_live(self, number: int, reason: str) -> None:
        if number == self._publisher.pointer.number:
            return
        if number not in self._writer.numbers():
            raise AdaSpecError(
                f"version {number} is not in {self._writer.directory}; choose from "
                f"{', '.join(map(str, self._writer.numbers()))}."
            )
        if not self._publisher.switch(number, reason):
            raise AdaSpecError(self._publisher.last_failure)
        self._restart()

    def _publish(self, directory: Path) -> None:
        if not directory.is_absolute():
            raise AdaSpecError(f"{directory} is no absolute path; name it from the root.")
        config = read_drafter_config(directory)
        if config != self._writer.config:
            raise AdaSpecError(
                f"{directory} holds a drafter of another shape than the one that is served; only "
                "drafters that were trained from it can take its place."
            )
        base = self._writer.stage(BASE).tensors
        tensors = {
            name: tensor.to(base[name].dtype) if name in base else tensor
            for name, tensor in read_tensors(directory).items()
        }
        shared = context_digest(tensors) == self._writer.base.context_sha256
        mode: Mode = "frozen-kv" if shared else "full"
        provenance = Provenance(
            parent=self._publisher.pointer.number,
            mode=mode,
            objective=f"published by an operator from {directory}",
            optimiser="",
            steps=0,
            tokens_seen=0,
            gate=None,
        )
        if not self._publisher.publish(tensors, provenance):
            raise AdaSpecError(self._publisher.last_failure)
        self._restart()

    def _state(self) -> str:
        live, hold = self._publisher.pointer.number, self.hold
        learning = "learning is paused" if hold.paused else "the learner learns"
        pinned = "" if hold.pinned is None else f" and pinned (version {hold.pinned})"
        return f"version {live} is live{pinned}, {learning}"

    def _keep(self, hold: Hold) -> None:
        try:
            replace_file(self._file, msgspec.json.encode(hold))
        except OSError as error:
            raise AdaSpecError(
                f"{self._file} cannot be written ({error.strerror}), so nothing was changed; free "
                "some disk space."
            ) from error
        self.hold = hold


def _read(file: Path) -> Hold:
    """What was held before; a damaged file pauses learning, as nobody knows what it said."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Hold)
    except FileNotFoundError:
        return Hold()
    except (OSError, msgspec.DecodeError) as error:
        logger.error("%s is damaged (%s): learning is paused until it is resumed", file, error)
        return Hold(paused=True)
