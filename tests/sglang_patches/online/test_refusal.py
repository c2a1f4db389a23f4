"""A version that the server cannot load: the learner hears of it, serving goes on."""

from types import SimpleNamespace

import pytest

from adaspec.feedback import FeedbackCollector, RollbackRecord
from adaspec.versions import Refusal
from sglang_patches.online.loop import OnlineLoop
from tests.online.world import LINEAGE, RecordingSender


class Swapper:
    """Serves version 3 for ever, and has refused what it is given."""

    version = drafting = 3

    def __init__(self, *refusals: Refusal) -> None:
        self._refusals = list(refusals)

    def between_steps(self) -> None:
        return None

    def take_refusal(self) -> Refusal | None:
        return self._refusals.pop(0) if self._refusals else None


@pytest.mark.parametrize("refused", [7, 3])
def test_a_refused_version_is_told_once_unless_it_is_served(refused: int) -> None:
    sender = RecordingSender()
    tap = SimpleNamespace(sink=FeedbackCollector(sender, LINEAGE))
    swapper = Swapper(Refusal(refused, "its file is damaged"))
    loop = OnlineLoop(None, tap, swapper, None, None)
    for _ in range(3):
        loop.before_step()
    tap.sink.close()
    notice = RollbackRecord(LINEAGE, refused, 3, "its file is damaged", "refusal")
    assert sender.records == ([notice] if refused != 3 else [])
