"""Looks for input that a boundary neither takes nor refuses, guided by the code that it reaches.

    python -m tests.fuzz.guided [TARGET ...] --seconds 60 --corpus DIR --seed 0
    python -m tests.fuzz.guided TARGET --replay FILE

An input that goes where none has been joins the corpus, and is bent further. What goes wrong is
saved with the command that shows it again, and the exit status is 1. An input that ends the whole
process, or never comes back, is left in the file ``running`` of its target.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import resource
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("adaspec", "online", "sglang_patches"))

# What one input may cost at most; these inputs are small, and a followed check is slow.
_MOST_SECONDS = 10.0
_MOST_GROWTH_KIB = 256 << 10
_LONGER_BYTES = 1 << 14
_HANGING_AFTER_S = 120.0

Arc = tuple[str, int, int]


class Arcs:
    """Steps from line to line in files under ``roots`` that anything followed has taken."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.taken: set[Arc] = set()
        self._roots = tuple(roots)
        self._is_followed: dict[str, bool] = {}

    def follow(self, act: Callable[[], object]) -> bool:
        """Do this; True if it took a step that was not taken before."""
        known, before = len(self.taken), sys.gettrace()
        sys.settrace(self._enter)
        try:
            act()
        finally:
            sys.settrace(before)
        return len(self.taken) > known

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        take, name, last = self.taken.add, code.co_filename, 0
        followed = self._is_followed.get(name)
        if followed is None:
            followed = self._is_followed[name] = name.startswith(self._roots)
        if not followed:
            return None

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                take((name, last, frame.f_lineno))
                last = frame.f_lineno
            elif event == "return":
                take((name, last, -code.co_firstlineno))
            return step

        return step


@dataclass(frozen=True)
class Finding:
    """An input that a target neither took nor refused, and what happened instead."""

    error: str
    data: bytes


@dataclass
class Outcome:
    """What a search has come to.

    Attributes:
        executions: inputs that were tried.
        corpus: the first inputs, and those that went where none had been.
        arcs: different steps from line to line that were taken.
        findings: one input of each kind of error.
    """

    corpus: list[bytes]
    executions: int = 0
    arcs: int = 0
    findings: list[Finding] = field(default_factory=list)


def trouble(check: Callable[[], object]) -> str | None:
    """What is wrong with this check, as its kind of error and the place that it comes from."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        check()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno} ({last.name})"
    if time.monotonic() - begun > _MOST_SECONDS:
        return f"took more than {_MOST_SECONDS:.0f} s"
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > _MOST_GROWTH_KIB:
        return f"took more than {_MOST_GROWTH_KIB >> 10} MiB"
    return None


def explore(
    target: Target,
    random: Random,
    more: Callable[[int], bool],
    *,
    roots: Sequence[str] = OURS,
    first: Sequence[bytes] = (),
    note: Callable[[bytes], object] = lambda data: None,
) -> Outcome:
    """Bend the inputs of a target, and those that lead somewhere new, while there is ``more``.

    Args:
        target: the boundary.
        random: makes the search the same again.
        more: whether to go on after so many executions.
        roots: where to follow the code; nowhere, and no bent input is bent again.
        first: inputs to begin with, beside the target's own.
        note: is told every input before it is tried.
    """
    arcs = Arcs(roots)
    outcome = Outcome(corpus=[])

    def execute(data: bytes) -> bool:
        note(data)
        outcome.executions += 1
        errors: list[str | None] = []
        is_new = arcs.follow(lambda: errors.append(trouble(lambda: target.check(data))))
        outcome.arcs = len(arcs.taken)
        (error,) = errors
        if error is not None and error not in {finding.error for finding in outcome.findings}:
            outcome.findings.append(Finding(error, data))
        return is_new

    begin = (*target.seeds, *target.found.values(), *first)
    longest = _LONGER_BYTES + max(map(len, begin))

    def bend(data: bytes) -> bytes:
        try:
            bent = target.mutate(data, random)
        except (ValueError, TypeError, OverflowError, RecursionError):
            # What was bent before may be no longer anything that the mutation can take apart.
            return mutate_bytes(data, random)
        return bent if len(bent) <= longest else data

    for data in begin:
        execute(data)
        outcome.corpus.append(data)
    while more(outcome.executions):
        corpus = outcome.corpus
        # Half of the time one of the newest: it got furthest, and little was tried on it.
        recent = corpus[-1 - len(corpus) // 4 :]
        data = random.choice(recent if random.random() < 0.5 else corpus)
        for _ in range(random.choice((1, 1, 2, 4))):
            data = bend(data)
        if execute(data):
            corpus.append(data)
    return outcome


def save(directory: Path, data: bytes) -> Path:
    """Write this to a file that is named after it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def search(name: str, seconds: float, corpus: Path, seed: int) -> bool:
    """Search one target, print what came of it; False if anything was found."""
    kept, running = corpus / name / "corpus", corpus / name / "running"
    kept.mkdir(parents=True, exist_ok=True)
    first = [path.read_bytes() for path in sorted(kept.iterdir())]
    faulthandler.dump_traceback_later(seconds + _HANGING_AFTER_S, exit=True, file=2)
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="f") as scratch:  # the paths of sockets must be short
        target = TARGETS[name](Path(scratch))
        with contextlib.closing(target):
            outcome = explore(
                target,
                Random(seed),
                lambda _: time.monotonic() < until,
                first=first,
                note=running.write_bytes,
            )
    running.unlink(missing_ok=True)
    faulthandler.cancel_dump_traceback_later()
    for data in outcome.corpus:
        save(kept, data)
    print(
        f"{name}: {outcome.executions} executions, {len(outcome.corpus)} inputs in the corpus, "
        f"{outcome.arcs} arcs, {len(outcome.findings)} findings",
        flush=True,
    )
    for finding in outcome.findings:
        path = save(corpus / name / "findings", finding.data)
        command = ["python", "-m", "tests.fuzz.guided", name, "--replay", str(path)]
        print(f"  {finding.error}: {shlex.join(command)}", flush=True)
    return not outcome.findings


def replay(name: str, path: Path) -> None:
    """Give a saved input to a target; what goes wrong is raised."""
    with tempfile.TemporaryDirectory(prefix="f") as scratch:
        target = TARGETS[name](Path(scratch))
        with contextlib.closing(target):
            accepted = target.check(path.read_bytes())
    print(f"{name}: {'accepted' if accepted else 'refused'}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all, unless some are named")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept for the next search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="only give this to the target")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"there is no target {unknown[0]}; choose from {', '.join(TARGETS)}.")
    if options.replay is not None and len(options.targets) != 1:
        parser.error("--replay needs the one target that the file is for.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Search the named targets, one after the other; 1 if anything was found."""
    options = parse_arguments(arguments)
    if options.replay is not None:
        replay(options.targets[0], options.replay)
        return 0
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="adaspec-fuzz-"))
    print(f"the corpus is in {corpus}", flush=True)
    names = options.targets or list(TARGETS)
    clean = [search(name, options.seconds, corpus, options.seed) for name in names]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
