"""`adaspec serve --online`: a learner beside the server, and the channel between them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from adaspec.cli.places import channel_directory, online_home, store_directory
from adaspec.config import AdaSpecConfig, write_config
from adaspec.errors import AdaSpecError

if TYPE_CHECKING:
    from adaspec.feedback.sockets import Endpoint


@dataclass(frozen=True, kw_only=True)
class OnlinePlan:
    """A learner ready to be started.

    Attributes:
        config: the server's configuration, completed and written to a file.
        command: the learner's.
        status: endpoint of its status stream.
        sentences: what the user should know.
    """

    config: Path
    command: tuple[str, ...]
    status: "Endpoint"
    sentences: tuple[str, ...]


def plan_online(
    config: AdaSpecConfig, drafter: Path, target: str, learn_config: Path | None, port: int
) -> OnlinePlan:
    """Complete the configuration and describe the learner.

    Sockets and versions lie in the cache directory, under the drafter's lineage, so that a server
    that is started again goes on with what was learned; what the configuration names instead is
    kept.

    Raises:
        AdaSpecError: if the target is not a local directory, a file cannot be written, or the
            channel cannot be used.
    """
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.feedback import open_channel
    from adaspec.versions import lineage_of

    if not Path(target).is_dir():
        raise AdaSpecError(
            f"--online reads the embeddings of the target, and {target} is no local directory; "
            "download it and give its directory with --target."
        )
    given = config.channel
    if given.keys is not None or given.address is not None:
        raise AdaSpecError(
            "--online starts a learner of its own, which needs no keys; leave channel.address and "
            "channel.keys out of the configuration, or serve without --online and start "
            "`adaspec learn` with the learner's keys."
        )
    home = online_home(lineage_of(drafter))
    channel = msgspec.structs.replace(
        given,
        directory=given.directory or str(channel_directory(home)),
        store=given.store or str(store_directory(home)),
    )
    completed = msgspec.structs.replace(
        config, tap=msgspec.structs.replace(config.tap, enabled=True), channel=channel
    )
    file = home / f"serve-{port}.toml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_config(completed, file)
    except OSError as error:
        raise AdaSpecError(
            f"cannot write {file} ({error.strerror}); set ADASPEC_CACHE to a directory you can "
            "write to."
        ) from error
    status = open_channel(Path(str(channel.directory))).status
    command = [sys.executable, "-m", "online", "--drafter", str(drafter), "--target", target]
    command += ["--store", str(channel.store), "--channel", str(channel.directory)]
    if learn_config is not None:
        command += ["--config", str(learn_config)]
    return OnlinePlan(
        config=file,
        command=tuple(command),
        status=status,
        sentences=(f"Learner: versions go to {channel.store}",),
    )
