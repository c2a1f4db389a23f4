"""What stands in for a learner: a consumer that discards, a publisher that does not learn.

Each is a process of its own. The costs of the tap and of a swap are measured against them, apart
from what a real learner computes beside the server.
"""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from torch import Tensor

from adaspec.feedback import FeedbackReceiver, open_channel
from adaspec.versions import BASE, Announcer, Mode, Provenance, is_context_weight, open_writer

_POLL_S = 0.05
_NICENESS = 10  # a learner's default
_KEPT_VERSIONS = 2

# Started afresh: the parent has threads, and may have a CUDA context.
_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What the publisher does.

    Attributes:
        drafter: the base; every other version has its weights.
        seconds: between two versions.
        mode: ``frozen-kv`` changes no weight that context K/V are made of.
        noise: standard deviation of the change, relative to that of the weight.
    """

    store: Path
    channel: Path
    drafter: Path
    seconds: float
    mode: Mode
    noise: float


@contextmanager
def discarding_consumer(channel: Path, lineage: str) -> Iterator[None]:
    """Receive, decode and forget feedback for the length of a ``with`` block."""
    process = _processes.Process(target=_consume, args=(channel, lineage), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


@contextmanager
def publisher(publication: Publication) -> Iterator[Event]:
    """Publish for the length of a ``with`` block, while the event is set."""
    active = _processes.Event()
    process = _processes.Process(target=_publish, args=(publication, active), daemon=True)
    process.start()
    try:
        yield active
    finally:
        process.terminate()
        process.join()


def perturbed(tensors: Mapping[str, Tensor], mode: Mode, noise: float) -> dict[str, Tensor]:
    """The weights with noise on those that a mode lets training change."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, tensor: Tensor) -> Tensor:
        if mode == "frozen-kv" and is_context_weight(name):
            return tensor
        values = tensor.float()
        scale = noise * values.std(correction=0)
        return (values + scale * torch.randn(values.shape, generator=generator)).to(tensor.dtype)

    return {name: change(name, tensor) for name, tensor in tensors.items()}


def _consume(channel: Path, lineage: str) -> None:
    receiver = FeedbackReceiver(open_channel(channel).feedback, lineage)
    while _parent_lives():
        receiver.receive(_POLL_S)


def _publish(publication: Publication, active: Event) -> None:
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    writer = open_writer(publication.store, publication.drafter)
    announcer = Announcer(open_channel(publication.channel).versions)
    base = writer.stage(BASE).tensors
    sets = (perturbed(base, publication.mode, publication.noise), base)
    for steps, tensors in enumerate(itertools.cycle(sets), start=1):
        due = time.monotonic() + publication.seconds
        while not active.is_set() or time.monotonic() < due:
            if not _parent_lives():
                return
            time.sleep(_POLL_S)
        provenance = Provenance(
            parent=writer.current().number,
            mode=publication.mode,
            objective="none",
            optimiser="noise",
            steps=steps,
            tokens_seen=0,
            gate=None,
        )
        number = writer.add(tensors, provenance).number
        announcer.announce(writer.point(number, "it is time for another version"))
        writer.prune(_KEPT_VERSIONS)


def _parent_lives() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()
