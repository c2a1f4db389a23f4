"""The learner's main loop: feedback in, training steps, judged candidates, versions out."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from adaspec.control import ControlDesk
from adaspec.errors import AdaSpecError
from adaspec.feedback import Channel, FeedbackReceiver, RollbackRecord
from adaspec.versions import (
    BASE,
    Activity,
    Announcer,
    GateVerdict,
    LearnerStatus,
    Provenance,
    StatusPublisher,
    context_digest,
    open_writer,
)
from adaspec.versions.manifest import describe
from online.assembly import Assembler
from online.batch import sample_blocks
from online.config import LearnConfig
from online.controls import Controls
from online.device import learning_device
from online.ensemble import build_training
from online.evaluator import Evaluator
from online.gate import judge
from online.intake import Intake
from online.pace import Pace
from online.publisher import Decision, Publisher
from online.replay import ReplayBuffer
from online.state import LearnerState, SavedState, dump_rng, load_state, restore_rng, save_state
from online.target import load_target_matrices
from online.trainer import StepReport

logger = logging.getLogger(__name__)

_STATE_DIRECTORY = "learner"
_IDLE_SECONDS = 0.05
# So many steps in a row without a finite loss are the fault of the weights, not of the feedback.
_MOST_SKIPPED = 16
# Of what came while the learner was busy, the newest are enough to tell experts apart.
_MOST_OBSERVED = 16


@dataclass
class _Totals:
    """Counters that survive a restart."""

    learning_seconds: float = 0.0
    published: int = 0
    kept: int = 0
    rolled_back: int = 0
    failures: int = 0


class Learner:
    """Everything the learner process holds.

    Args:
        drafter: directory of the base drafter, the one the server started with.
        target: directory of the target, of which two matrices are read.
        store: directory of the version store, made if it does not exist.
        channel: where the server is met.

    Raises:
        AdaSpecError: if drafter, target and store do not fit each other, or another learner has the
            store.
    """

    def __init__(
        self, drafter: Path, target: Path, store: Path, channel: Channel, config: LearnConfig
    ) -> None:
        self._config = config
        device = learning_device(config.process)
        self._writer = open_writer(store, drafter, channel.signing_key())
        self._base = self._writer.stage(BASE)
        network = self._writer.config
        matrices = load_target_matrices(target, network, device)
        self._announcer = Announcer(channel.versions)
        self._publisher = Publisher(self._writer, self._announcer, config.gate.keep_versions)
        self._status = StatusPublisher(channel.status)
        self._evaluator = Evaluator(network, matrices, config.gate.passes, config.batch.max_context)
        self._trainer = build_training(
            network, matrices, config, self._base.tensors, self._evaluator
        )
        self._pace = Pace(config.pace, time.monotonic)
        self._rng = np.random.default_rng(config.process.seed)
        self._totals = _Totals()
        self._steps_since_gate = self._skipped_in_a_row = 0
        self._controls = Controls(
            ControlDesk(channel),
            self._writer,
            self._publisher,
            self._start_over,
            lambda note: self._decided(None, note),
        )
        self._resume(load_state(self._state_directory, self._writer.lineage, config.mode))
        self._replay = ReplayBuffer(config.replay)
        self._drawn = 0
        self._last_step: StepReport | None = None
        self._verdict: GateVerdict | None = None
        self._next_status = self._next_save = time.monotonic()
        self._intake = Intake(
            FeedbackReceiver(channel.feedback, self._writer.lineage),
            Assembler(config.intake, network, matrices, config.batch.max_context),
            self._replay,
        )

    def run(self, stop: threading.Event) -> None:
        """Learn until told to stop; then save the state and leave."""
        try:
            while not stop.is_set():
                self._controls.serve()
                self._follow_rollbacks()
                self._notice_new()
                if self._controls.hold.paused:
                    self._report("paused")
                    stop.wait(_IDLE_SECONDS)
                elif self._may_step():
                    self._report("training")
                    self._step()
                    if self._may_judge():
                        self._report("judging", now=True)
                        self._judge()
                        self._save()
                else:
                    self._report("resting" if self._pace.is_resting else "waiting")
                    stop.wait(_IDLE_SECONDS)
                if time.monotonic() >= self._next_save:
                    self._save()
            self._save()
            self._report("stopping", now=True)
        finally:
            self.close()

    def close(self) -> None:
        """Release sockets and the store."""
        self._intake.close()
        self._controls.close()
        self._announcer.close()
        self._status.close()
        self._writer.close()

    @property
    def _state_directory(self) -> Path:
        return self._writer.directory / _STATE_DIRECTORY

    def _may_step(self) -> bool:
        """Whether it is time to learn, and the trajectories that came in pay for another step."""
        if not self._pace.may_learn():
            return False
        batch = self._config.batch
        wanted = self._replay.released * batch.passes
        return self._replay.released > 0 and self._drawn + batch.trajectories <= wanted

    def _may_judge(self) -> bool:
        """Whether it is time for a candidate, and the gate may act on the verdict."""
        is_time = self._steps_since_gate >= self._config.gate.every_steps
        return is_time and self._controls.hold.pinned is None

    def _notice_new(self) -> None:
        """Look at finished requests before any is learned from."""
        fresh = self._replay.take_new()
        if not fresh:
            return
        reason = self._pace.saw(fresh)
        if reason is not None:
            self._decided(None, f"learning resumes: {reason}")
        if not self._pace.is_resting and not self._controls.hold.paused:
            started = time.monotonic()
            self._trainer.observe(fresh[-_MOST_OBSERVED:])
            self._spent(time.monotonic() - started)

    def _step(self) -> None:
        config = self._config
        started = time.monotonic()
        trajectories = self._replay.draw(config.batch.trajectories, self._rng)
        self._drawn += len(trajectories)
        block_size, decay = self._writer.config.block_size, config.objective.position_decay
        report = self._last_step = self._trainer.step(
            [sample_blocks(t, config.batch, block_size, decay, self._rng) for t in trajectories]
        )
        self._steps_since_gate += report.applied
        self._skipped_in_a_row = 0 if report.applied else self._skipped_in_a_row + report.skipped
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            self._restart()
            self._decided(None, f"training starts again after {_MOST_SKIPPED} steps without a loss")
        self._spent(time.monotonic() - started)

    def _judge(self) -> None:
        """Offer the weights in training as a candidate, and act on the verdict."""
        started = time.monotonic()
        self._steps_since_gate = 0
        unseen = self._replay.unseen(self._config.gate.max_requests)
        candidate = self._trainer.export(self._base.tensors)
        live, number = self._publisher.live, self._publisher.pointer.number
        verdict = self._verdict = judge(
            self._evaluator.candidate(candidate, unseen),
            self._evaluator.version(number, live.tensors, unseen),
            self._evaluator.version(BASE, self._base.tensors, unseen),
            number,
            self._config.gate,
        )
        note = "nothing changed"
        if verdict.action == "publish":
            if self._publisher.publish(candidate, self._provenance(candidate, verdict)):
                self._totals.published += 1
                self._parent = self._publisher.pointer.number
                note = f"version {self._parent} is live"
            else:
                note = "the version could not be published"
        elif verdict.action == "base":
            if self._publisher.switch(BASE, verdict.reason):
                self._restart()
                self._totals.rolled_back += 1
                note = "the base is live again, and training starts from it"
        else:
            self._totals.kept += 1
            if verdict.over_incumbent.high < 0:
                self._restart()
                note = "training starts again from the live version"
        if verdict.requests >= self._config.gate.min_requests and self._pace.judged(
            changed=verdict.action != "keep"
        ):
            note += "; learning rests until traffic changes"
        self._decided(verdict, note)
        self._evaluator.forget([BASE, self._publisher.pointer.number], unseen)
        self._spent(time.monotonic() - started)

    def _follow_rollbacks(self) -> None:
        """Do as the server did: it watches live acceptance, and the pointer is ours to move."""
        while (notice := self._intake.take_rollback()) is not None:
            if notice.version != self._publisher.pointer.number:
                continue  # about a version that is no longer live
            self._controls.released(notice.version)
            # The version that serves again may have been pruned here; the base never is.
            if self._publisher.switch(notice.restored, notice.reason) or self._publisher.switch(
                BASE, notice.reason
            ):
                self._start_over()
                self._totals.rolled_back += 1
                self._decided(None, _describe_rollback(notice))

    def _spent(self, seconds: float) -> None:
        self._totals.learning_seconds += seconds
        self._pace.spent(seconds)

    def _start_over(self) -> None:
        """Go on from a live version that others have put in place."""
        self._pace.wake()
        self._restart()

    def _restart(self) -> None:
        self._skipped_in_a_row = 0
        self._trainer.restart_from(self._publisher.live.tensors)
        self._parent = self._publisher.pointer.number

    def _decided(self, verdict: GateVerdict | None, note: str) -> None:
        self._publisher.record(
            Decision(
                time=time.time(),
                steps=self._trainer.steps,
                live=self._publisher.pointer,
                verdict=verdict,
                note=note,
            )
        )

    def _provenance(self, weights: Mapping[str, Tensor], verdict: GateVerdict) -> Provenance:
        # Training may have started from a version of others, with context weights of its own.
        shared = context_digest(weights) == self._writer.base.context_sha256
        return Provenance(
            parent=self._parent,
            mode=self._config.mode if shared else "full",
            objective=describe(self._config.objective),
            optimiser=describe(self._config.optimiser),
            steps=self._trainer.steps,
            tokens_seen=self._trainer.tokens_seen,
            gate=verdict,
        )

    def _resume(self, saved: SavedState | None) -> None:
        """Go on from a saved state, or from the live version if there is none."""
        self._restart()  # a state holds only what is trained
        if saved is None:
            return
        state = saved.state
        self._trainer.steps = state.steps
        self._trainer.skipped_steps = state.skipped_steps
        self._trainer.tokens_seen = state.tokens_seen
        self._totals = _Totals(
            state.learning_seconds,
            state.published,
            state.kept,
            state.rolled_back,
            state.failures,
        )
        restore_rng(self._rng, state.rng)
        if state.sequence != self._publisher.pointer.sequence:
            # Killed between publication and saving: the live version is newer than the state.
            return
        self._steps_since_gate = state.steps_since_gate
        try:
            self._trainer.load_state_tensors(saved.tensors, state.optimiser_steps)
        except AdaSpecError as error:
            logger.warning("training starts from the live version: %s", error)
            return
        self._parent = state.parent
        logger.info("resumed after %d steps", state.steps)

    def _save(self) -> None:
        self._next_save = time.monotonic() + self._config.save_seconds
        trainer, totals = self._trainer, self._totals
        state = LearnerState(
            lineage=self._writer.lineage,
            mode=self._config.mode,
            parent=self._parent,
            sequence=self._publisher.pointer.sequence,
            steps=trainer.steps,
            skipped_steps=trainer.skipped_steps,
            tokens_seen=trainer.tokens_seen,
            optimiser_steps=trainer.optimiser_steps,
            steps_since_gate=self._steps_since_gate,
            learning_seconds=totals.learning_seconds,
            published=totals.published,
            kept=totals.kept,
            rolled_back=totals.rolled_back + self._controls.rolled_back,
            failures=self._failures,
            rng=dump_rng(self._rng),
        )
        try:
            save_state(self._state_directory, state, trainer.state_tensors())
        except AdaSpecError as error:
            totals.failures += 1
            logger.error("%s", error)

    @property
    def _failures(self) -> int:
        return self._totals.failures + self._publisher.failures

    def _report(self, activity: Activity, now: bool = False) -> None:
        if not now and time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + self._config.status_seconds
        self._status.publish(self.status(activity))

    def status(self, activity: Activity) -> LearnerStatus:
        """The learner's state now."""
        trainer, totals, last = self._trainer, self._totals, self._last_step
        training, held, nbytes = self._replay.sizes()
        return LearnerStatus(
            lineage=self._writer.lineage,
            time=time.time(),
            process=os.getpid(),
            activity=activity,
            live_version=self._publisher.pointer.number,
            sequence=self._publisher.pointer.sequence,
            pinned=self._controls.hold.pinned,
            steps=trainer.steps,
            skipped_steps=trainer.skipped_steps,
            tokens_seen=trainer.tokens_seen,
            loss=last.loss if last else None,
            cross_entropy=last.cross_entropy if last else None,
            divergence=last.divergence if last else None,
            accuracy=last.accuracy if last else None,
            trust=trainer.trust,
            learning_seconds=totals.learning_seconds,
            published=totals.published,
            kept=totals.kept,
            rolled_back=totals.rolled_back + self._controls.rolled_back,
            failures=self._failures,
            replay_trajectories=training,
            replay_bytes=nbytes,
            held_back=held,
            feedback=self._intake.counters(),
            verdict=self._verdict,
        )


def _describe_rollback(notice: RollbackRecord) -> str:
    word = "gave up" if notice.cause == "acceptance" else "refused"
    return f"the server {word} version {notice.version} for {notice.restored}: {notice.reason}"
