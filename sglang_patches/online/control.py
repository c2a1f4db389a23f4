"""Control windows: every so often a few consecutive steps draft with the frozen base.

The base drafts for the same requests at the same time as the live version, so a change of traffic
meets both, and what is left between them is the version's doing. The share is one of steps and not
of requests: requests drafted by other weights would need a second draft pass in every step.

The windows are a function of the number of drafted steps since the swap, which is the same on
every tensor-parallel rank, so ranks change weights on the same step without a message.
"""

import logging

from sglang_patches.online.clock import StreamClock
from sglang_patches.online.served import Served, Standing
from sglang_patches.online.weights import DraftWeights

logger = logging.getLogger(__name__)

# Long enough that two writes of the drafter's weights are little beside the steps between windows:
# 0.25 % of the time of 256 steps on two CPU cores (docs/online.md).
WINDOW_STEPS = 8
# Just after a swap, when least is known, windows follow each other after a quarter of the steps
# so far, until they are as rare as the share says.
_AGE_TO_GAP = 4


class ControlWindows:
    """Opens and closes windows on the scheduler's thread, in place and without waiting.

    They are run while the live version is another than the base and its context K/V are the base's
    (mode ``frozen-kv``). A version with context weights of its own has filled the draft KV cache
    with entries that the base was not made for, and would win unfairly.

    Attributes:
        standing: what the live version can be compared with.
        is_open: the base drafts now.
        exchanges: changes of weights so far, to the base or back.

    Args:
        weights: of the served draft model, which hold the base (`DraftWeights.hold_base`).
        base: the frozen base.
        share: of the drafted steps in the long run, at most 0.5; 0 runs no windows.
    """

    def __init__(self, weights: DraftWeights, base: Served, share: float) -> None:
        self._weights = weights
        self._share = share
        self._age = 0  # drafted steps since the swap
        self._next_change = 0  # age at which the window opens, or closes
        self._clock: StreamClock | None = None
        self._told = False
        self.base = base
        self.standing: Standing = "base" if share else "alone"
        self.is_open = False
        self.exchanges = 0

    def follow(self, live: Served) -> None:
        """Another version is live, whose weights are in place; the window must be closed."""
        self._age, self._next_change = 0, WINDOW_STEPS
        if not self._share:
            return
        if live.number == self.base.number:
            self.standing = "base"
        elif live.context_sha256 == self.base.context_sha256:
            self.standing = "controlled"
        else:
            self.standing = "alone"
        if self.standing == "alone" and not self._told:
            self._told = True
            logger.info(
                "version %d has context weights of its own: it is compared with the traffic before "
                "it, not with the frozen base",
                live.number,
            )

    def count_draft(self) -> None:
        """A step with a draft pass has run."""
        self._age += 1

    def before_step(self) -> None:
        """Open or close the window if it is time to."""
        if self.standing != "controlled" or self._age < self._next_change:
            return
        if self.is_open:
            self.close()
        else:
            self._open()

    def close(self) -> None:
        """Draft with the live version again, whether or not the window is over."""
        if not self.is_open:
            return
        longest = round(WINDOW_STEPS * (1 - self._share) / self._share)
        self._next_change = self._age + min(max(self._age // _AGE_TO_GAP, WINDOW_STEPS), longest)
        self.exchanges += 1
        self._clock = StreamClock(self._weights.on_gpu)
        self._weights.draft_with_live()
        self._clock.stop()
        self.is_open = False

    def wait(self) -> None:
        """Until the device has done the last exchange; from another thread."""
        if self._clock is not None:
            self._clock.seconds()

    def _open(self) -> None:
        self._next_change = self._age + WINDOW_STEPS
        # Counted and shown before the first write, for whoever reads the weights meanwhile.
        self.exchanges += 1
        self.is_open = True
        self._clock = StreamClock(self._weights.on_gpu)
        self._weights.draft_with_base()
        self._clock.stop()
