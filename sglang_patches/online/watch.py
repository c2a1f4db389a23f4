"""Live acceptance on trial: a version that commits fewer tokens per pass is given up.

**With a control** (`sglang_patches.online.control`) a version's *gain* is its committed tokens per
pass over those of the base in the control windows, each window compared with the live steps just
before it: the same requests, the same moment. A version goes

1. if its gain is below one, however long it has been live, and
2. while it is on trial, if its gain is below the gain of the version before it, when that was live.

Both are comparisons with the base at the same time, so traffic that becomes harder or easier for
base and version alike changes neither. What is left is traffic that takes away the older
version's gain at the moment of the swap: rule 2 counts that against the new one, since nobody
drafts with the old one any more to tell. Plain acceptance before and after the swap decides
nothing here, also not while the windows are still few: it is the very number that a change of
traffic moves, and the first windows follow the swap within a few steps.

**Without a control** (switched off; or the version has context weights of its own) the live steps
since the swap are compared with those just before it, and a change of traffic at that moment
counts for or against the version; the gate, which replays the same requests, does not share that.

*Below* means by more than ``max_fall`` and beyond noise. Noise is the scatter between observations
at Student's t, with the error probability ``1 - confidence`` shared among all looks of a version's
life (`Looks`). After the trial, evidence is started afresh every 256 windows, so that a version
that gained for days is not kept on the strength of that.
"""

from collections import deque
from dataclasses import dataclass

from adaspec.config import WatchConfig
from sglang_patches.online.evidence import EXACTLY_ONE, FEWEST, Looks, Ratio, is_a_look, ratio_of
from sglang_patches.online.served import Standing

# Steps joined into one observation of the plain rate, so that neighbouring steps of the same
# requests, which are alike, do not count as independent evidence.
_STEPS = 16
_TRIAL_WINDOWS = 32
_RECENT_WINDOWS = 64  # those that tell a version's gain
_EPOCH_WINDOWS = 256  # those after which evidence is started afresh


@dataclass(frozen=True)
class Outcome:
    """The end of a trial, or of a version.

    Attributes:
        roll_back: the version has to go.
        reason: one sentence with the numbers.
    """

    roll_back: bool
    reason: str


class AcceptanceWatch:
    """Decides which live version goes; the same decision on every rank that counts the same steps.

    Args:
        config: thresholds.
        standing: of the version the server starts with.
    """

    def __init__(self, config: WatchConfig, standing: Standing) -> None:
        self._config = config
        # What a roll-back restores is the live version itself once its trial is over.
        self._live = self._trusted = _Life(config, standing)
        self._given_up = False
        self._gain: Ratio | None = None

    @property
    def on_trial(self) -> bool:
        """Whether the live version has not proved itself yet."""
        return self._live is not self._trusted

    @property
    def gain(self) -> Ratio | None:
        """The live version's gain in its last 64 control windows, another object after each; None
        before the eighth.
        """
        return self._gain

    def swapped(self, rolled_back: bool, standing: Standing) -> None:
        """Another version is live.

        Args:
            rolled_back: it is the trusted one again or, if that was live, the base.
            standing: what it can be compared with. The base stays without a trial.
        """
        self._given_up = False
        self._gain = None
        if rolled_back and self.on_trial:
            self._live = self._trusted
            self._live.start_afresh()
        else:
            self._live = _Life(self._config, standing)
            if rolled_back or standing == "base":
                self._trusted = self._live

    def observe(self, committed: int, passes: int, control: bool = False) -> Outcome | None:
        """Count a step of the live version; the outcome, if there is one now.

        Args:
            committed: tokens of all requests, bonus tokens included.
            passes: requests in the step.
            control: the step is of a control window, drafted by the base.
        """
        if self._given_up:  # its last steps, until the roll-back takes place
            return None
        live = self._live
        step_completes, window_completes = live.add(committed, passes, control)
        outcome = None
        if live.standing == "controlled" and window_completes:
            gain = live.gain()
            self._gain = gain if gain.observations >= FEWEST else None
            outcome = self._judge_gain()
        elif live.standing == "alone" and step_completes and self.on_trial:
            outcome = self._judge_rate()
        if outcome is not None:
            self._given_up = outcome.roll_back
            if not outcome.roll_back:
                self._trusted = live
        return outcome

    def _judge_gain(self) -> Outcome | None:
        live, floor = self._live, 1 - self._config.max_fall
        windows = len(live.windows)
        if not is_a_look(windows):
            return None
        gain = ratio_of(live.windows)
        lower, half_width = live.looks.is_lower(gain, EXACTLY_ONE, floor)
        text = (
            f"{gain.value:.3f} ± {half_width:.3f} times the base's committed tokens per pass over "
            f"{windows} control windows"
        )
        if lower:
            return Outcome(True, text)
        before = self._trusted.gain()
        if self.on_trial and self._trusted.standing == "controlled":
            text += f", {before.value:.3f} times before"
            if before.observations >= FEWEST:
                lower, half_width = live.looks_back.is_lower(gain, before, floor)
                if lower:
                    return Outcome(True, f"{text} (± {half_width:.3f})")
        if windows == _EPOCH_WINDOWS:
            live.windows.clear()
        return Outcome(False, text) if self.on_trial and windows >= _TRIAL_WINDOWS else None

    def _judge_rate(self) -> Outcome | None:
        before, now = self._trusted.steps, self._live.steps
        ends = now.committed >= self._config.window_tokens
        if not (ends or is_a_look(len(now.observations))):
            return None
        rate, rate_before = ratio_of(now.observations), ratio_of(before.observations)
        text = f"{rate.value:.3f} committed tokens per pass over {now.committed} tokens, "
        if min(rate.observations, rate_before.observations) < FEWEST:
            return Outcome(False, f"{text}too few before") if ends else None
        floor = 1 - self._config.max_fall
        lower, half_width = self._live.looks.is_lower(rate, rate_before, floor)
        if not (lower or ends):
            return None
        return Outcome(lower, f"{text}{rate_before.value:.3f} ± {half_width:.3f} before")


class _Life:
    """What has been seen of one version.

    Attributes:
        standing: what it can be compared with.
        steps: its newest steps.
        windows: control windows since evidence was started afresh; of each, the tokens that the
            version would have committed in the window's passes, at its rate in the live steps just
            before, and those that the base committed.
        looks, looks_back: error probabilities of the comparison with the base, or the traffic
            before, and of the comparison with the gain before.
    """

    def __init__(self, config: WatchConfig, standing: Standing) -> None:
        self.standing = standing
        self.steps = _Steps(config.window_tokens)
        self.windows: list[tuple[float, float]] = []
        self._newest: deque[tuple[float, float]] = deque(maxlen=_RECENT_WINDOWS)
        self._error = 1 - config.confidence
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget the evidence for and against the version, but not what it is compared with."""
        self.windows.clear()
        share = self._error / 2 if self.standing == "controlled" else self._error
        self.looks, self.looks_back = Looks(share), Looks(share)
        self._live_steps = self._control_steps = (0, 0)  # (committed, passes)

    def gain(self) -> Ratio:
        """The gain over the newest windows."""
        return ratio_of(self._newest)

    def add(self, committed: int, passes: int, control: bool) -> tuple[bool, bool]:
        """Count a step; whether an observation of steps, and one of a window, is complete now."""
        if control:
            self._control_steps = _sum(self._control_steps, (committed, passes))
            return False, False
        window_completes = self._complete_window()
        self._live_steps = _sum(self._live_steps, (committed, passes))
        return self.steps.add(committed, passes), window_completes

    def _complete_window(self) -> bool:
        """The first live step behind a window completes it."""
        (base, base_passes), (live, live_passes) = self._control_steps, self._live_steps
        if not base_passes:
            return False
        self._live_steps = self._control_steps = (0, 0)
        if not live_passes:
            return False
        window = (live / live_passes * base_passes, float(base))
        self.windows.append(window)
        self._newest.append(window)
        return True


class _Steps:
    """The newest steps that make up a number of committed tokens.

    Attributes:
        observations: (committed tokens, passes) of 16 steps each.
        committed: tokens in them.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.observations: deque[tuple[int, int]] = deque()
        self.committed = 0
        self._open = (0, 0)
        self._open_steps = 0

    def add(self, committed: int, passes: int) -> bool:
        """Count a step; True if an observation is complete with it."""
        self._open = _sum(self._open, (committed, passes))
        self._open_steps += 1
        if self._open_steps < _STEPS:
            return False
        self.observations.append(self._open)
        self.committed += self._open[0]
        self._open, self._open_steps = (0, 0), 0
        while self.committed - self.observations[0][0] >= self._tokens:
            self.committed -= self.observations.popleft()[0]
        return True


def _sum(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    return left[0] + right[0], left[1] + right[1]
