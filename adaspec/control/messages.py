"""The requests an operator can make of a learner, and the reply, as they are on the wire."""

from typing import Annotated

import msgspec
from msgspec import Meta

from adaspec.versions.manifest import VersionNumber

LARGEST_MESSAGE = 1 << 16  # bytes
_Path = Annotated[str, Meta(min_length=1, max_length=4096)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Inquire(_Message, frozen=True, kw_only=True, tag="inquire"):
    """Say what is live and what is held."""


class Pause(_Message, frozen=True, kw_only=True, tag="pause"):
    """Neither train nor judge from now on; feedback is still taken in."""


class Resume(_Message, frozen=True, kw_only=True, tag="resume"):
    """End a pause."""


class RollBack(_Message, frozen=True, kw_only=True, tag="roll-back"):
    """Make an older version live and train from it.

    Attributes:
        version: None for the one that the live version was trained from.
    """

    version: VersionNumber | None = None


class Pin(_Message, frozen=True, kw_only=True, tag="pin"):
    """Make a version live and publish no other until `Unpin`; training goes on.

    Attributes:
        version: None for the live one.
    """

    version: VersionNumber | None = None


class Unpin(_Message, frozen=True, kw_only=True, tag="unpin"):
    """Let the gate decide again."""


class Publish(_Message, frozen=True, kw_only=True, tag="publish"):
    """Make the drafter in a directory the live version, whatever the gate would say.

    Attributes:
        directory: absolute, on the learner's machine.
    """

    directory: _Path


Request = Inquire | Pause | Resume | RollBack | Pin | Unpin | Publish


class Envelope(_Message, frozen=True, kw_only=True):
    """What is sent.

    Attributes:
        token: see `Channel.control_token`.
    """

    token: Annotated[str, Meta(max_length=128)]
    request: Request


class Reply(_Message, frozen=True, kw_only=True):
    """What became of a request.

    Attributes:
        done: whether it was carried out.
        message: one sentence.
    """

    done: bool
    message: str
