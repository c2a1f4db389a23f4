"""The feedback stream: records of verified blocks, from the server to the learner."""

from adaspec.feedback.channel import Channel, open_channel
from adaspec.feedback.collector import (
    EndCapture,
    FeedbackCollector,
    PrefillCapture,
    StepCapture,
)
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
from adaspec.feedback.sampling import in_share
from adaspec.feedback.sender import FeedbackSender, SenderStats
from adaspec.feedback.wire import MalformedRecordError

__all__ = [
    "BlockRecord",
    "Channel",
    "ContextRecord",
    "EndCapture",
    "EndRecord",
    "FeedbackCollector",
    "FeedbackReceiver",
    "FeedbackSender",
    "HiddenTeacher",
    "MalformedRecordError",
    "PrefillCapture",
    "ReceiverStats",
    "Record",
    "RollbackCause",
    "RollbackRecord",
    "SenderStats",
    "StepCapture",
    "Teacher",
    "TopKTeacher",
    "in_share",
    "open_channel",
]
