"""The command line of the learner process."""

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer

from adaspec.errors import AdaSpecError
from adaspec.feedback import find_channel
from adaspec.feedback.relay_process import keep_out_of_core_dumps
from online.config import LearnConfig, ProcessSection, load_learn_config
from online.device import learning_device, limit_memory, plain_memory_errors
from online.learner import Learner

logger = logging.getLogger(__name__)


def learn(
    drafter: Annotated[Path, typer.Option(help="Drafter directory the server started with.")],
    target: Annotated[Path, typer.Option(help="Target model directory.")],
    store: Annotated[
        Path, typer.Option(help="Directory of the drafter versions; made if missing.")
    ],
    channel: Annotated[
        Path | None, typer.Option(help="Directory of the sockets shared with the server.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Instead: tcp://HOST:PORT, the first of four ports.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="The learner's file of `adaspec keys`.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings.")] = None,
) -> None:
    """Learn from a server's verification feedback and publish better drafters, until stopped."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = load_learn_config(config) if config else LearnConfig()
    meeting_place = find_channel(
        None if channel is None else str(channel), address, None if keys is None else str(keys)
    )
    _settle(settings.process)
    stop = threading.Event()

    def ask_to_stop(signal_number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    with plain_memory_errors(settings.process):
        Learner(drafter, target, store, meeting_place, settings).run(stop)


def _settle(process: ProcessSection) -> None:
    """Take the share of the machine that the settings allow.

    Raises:
        AdaSpecError: if there is no such CPU or GPU.
    """
    keep_out_of_core_dumps()
    os.nice(process.nice)
    torch.set_num_threads(process.threads)
    if process.cpus:
        try:
            os.sched_setaffinity(0, process.cpus)
        except OSError:
            raise AdaSpecError(
                f"process.cpus {list(process.cpus)} names no CPU this process may use; choose from "
                f"{sorted(os.sched_getaffinity(0))}."
            ) from None
    device = learning_device(process)
    limit_memory(device, process)
    logger.info("learning on %s", device)
