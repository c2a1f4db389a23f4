"""Weight versions: published by the learner, checked and swapped in by servers."""

from adaspec.versions.announce import Announcer, VersionWatcher
from adaspec.versions.digest import context_digest, is_context_weight
from adaspec.versions.export import export_version
from adaspec.versions.follower import Arrival, Refusal, VersionFollower
from adaspec.versions.manifest import (
    Action,
    GateVerdict,
    Interval,
    Manifest,
    Mode,
    Pointer,
    Provenance,
)
from adaspec.versions.status import Activity, LearnerStatus, StatusListener, StatusPublisher
from adaspec.versions.store import (
    BASE,
    StagedVersion,
    VersionStore,
    lineage_of,
    read_manifest,
)
from adaspec.versions.writer import VersionWriter, open_writer

__all__ = [
    "BASE",
    "Action",
    "Activity",
    "Announcer",
    "Arrival",
    "GateVerdict",
    "Interval",
    "LearnerStatus",
    "Manifest",
    "Mode",
    "Pointer",
    "Provenance",
    "Refusal",
    "StagedVersion",
    "StatusListener",
    "StatusPublisher",
    "VersionFollower",
    "VersionStore",
    "VersionWatcher",
    "VersionWriter",
    "context_digest",
    "export_version",
    "is_context_weight",
    "lineage_of",
    "open_writer",
    "read_manifest",
]
