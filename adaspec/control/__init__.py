"""What an operator asks of a running learner, and how it is asked."""

from adaspec.control.client import ask
from adaspec.control.desk import ControlDesk
from adaspec.control.messages import (
    Inquire,
    Pause,
    Pin,
    Publish,
    Request,
    Resume,
    RollBack,
    Unpin,
)

__all__ = [
    "ControlDesk",
    "Inquire",
    "Pause",
    "Pin",
    "Publish",
    "Request",
    "Resume",
    "RollBack",
    "Unpin",
    "ask",
]
