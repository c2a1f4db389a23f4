"""Making versions live, and keeping a record of every decision."""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from adaspec.decisions import DECISIONS_NAME
from adaspec.errors import AdaSpecError
from adaspec.versions import (
    Announcer,
    GateVerdict,
    Pointer,
    Provenance,
    StagedVersion,
    VersionWriter,
)

logger = logging.getLogger(__name__)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the decision log: `verdict` is None where a server or an operator decided."""

    time: float
    steps: int
    live: Pointer
    verdict: GateVerdict | None
    note: str


class Publisher:
    """Writes versions, moves the pointer and tells the servers.

    Attributes:
        live: the live version, its weights included.
        failures: attempts that failed; the live version was unchanged by them.
        last_failure: why the last of them did, one sentence.
    """

    def __init__(self, writer: VersionWriter, announcer: Announcer, keep_versions: int) -> None:
        self._writer = writer
        self._announcer = announcer
        self._keep = keep_versions
        self.failures = 0
        self.last_failure = ""
        self.pointer = writer.current()
        try:
            self.live: StagedVersion = writer.stage(self.pointer.number)
        except AdaSpecError as error:
            logger.error("the live version is damaged, the base takes its place: %s", error)
            self.pointer = writer.point(0, f"version {self.pointer.number} was damaged")
            self.live = writer.stage(0)
        announcer.announce(self.pointer)

    def publish(self, tensors: Mapping[str, Tensor], provenance: Provenance) -> bool:
        """Write a new version and make it live; False, with the failure logged, if it cannot."""
        try:
            manifest = self._writer.add(tensors, provenance)
        except AdaSpecError as error:
            self._fail(error)
            return False
        reason = provenance.gate.reason if provenance.gate else provenance.objective
        if not self.switch(manifest.number, reason):
            return False
        self._writer.prune(self._keep)
        return True

    def switch(self, number: int, reason: str) -> bool:
        """Make an existing version live; False, with the failure logged, if it cannot."""
        try:
            staged = self._writer.stage(number)
            self.pointer = self._writer.point(number, reason)
        except AdaSpecError as error:
            self._fail(error)
            return False
        self.live = staged
        self._announcer.announce(self.pointer)
        logger.info("version %d is live: %s", number, reason)
        return True

    def record(self, decision: Decision) -> None:
        """Append to the decision log, and log the same line."""
        line = msgspec.json.encode(decision)
        logger.info("decision: %s", line.decode())
        try:
            with self.decisions_path.open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:
            self._fail(error)

    @property
    def decisions_path(self) -> Path:
        """The decision log, JSON lines."""
        return self._writer.directory / DECISIONS_NAME

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.last_failure = str(error)
        logger.error("%s", error)
