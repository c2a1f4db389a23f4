"""The feedback stream: records of verified blocks, from the server to the learner."""

from adaspec.feedback.captures import CaptureSink, EndCapture, PrefillCapture, StepCapture
from adaspec.feedback.channel import Channel, find_channel, network_channel, open_channel
from adaspec.feedback.collector import FeedbackCollector
from adaspec.feedback.receiver import FeedbackReceiver, ReceiverStats
from adaspec.feedback.record import (
    BlockRecord,
    ContextRecord,
    EndRecord,
    HiddenTeacher,
    Record,
    RollbackCause,
    RollbackRecord,
    Teacher,
    TopKTeacher,
)
from adaspec.feedback.relay import FeedbackRelay, RelayOptions
from adaspec.feedback.sampling import in_share
from adaspec.feedback.sender import FeedbackSender, SenderStats
from adaspec.feedback.sockets import Endpoint
from adaspec.feedback.wire import MalformedRecordError

__all__ = [
    "BlockRecord",
    "CaptureSink",
    "Channel",
    "ContextRecord",
    "EndCapture",
    "EndRecord",
    "Endpoint",
    "FeedbackCollector",
    "FeedbackReceiver",
    "FeedbackRelay",
    "FeedbackSender",
    "HiddenTeacher",
    "MalformedRecordError",
    "PrefillCapture",
    "ReceiverStats",
    "Record",
    "RelayOptions",
    "RollbackCause",
    "RollbackRecord",
    "SenderStats",
    "StepCapture",
    "Teacher",
    "TopKTeacher",
    "find_channel",
    "in_share",
    "network_channel",
    "open_channel",
]
