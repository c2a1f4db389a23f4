"""The runtime configuration: one typed TOML file, named by the variable ADASPEC_CONFIG.

SGLang's command line stays stock; what AdaSpec adds is set here. Unknown keys, wrong types and
impossible values are refused at start with the key and the file named.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from adaspec.errors import AdaSpecError
from adaspec.plugins import check_factory
from adaspec.settings import read_settings

CONFIG_ENVIRONMENT_VARIABLE = "ADASPEC_CONFIG"

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class EmaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the policy ``ema``: a little more than was accepted lately on average.

    Attributes:
        weight: how much the newest step counts in the average of accepted drafts.
        margin: tokens verified beyond that average and the anchor.
    """

    weight: PositiveShare = 0.1
    margin: NotNegativeFloat = 2.0


class AdaFlashConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the policy ``adaflash``: the drafter's length head decides, as in AdaFlash.

    Attributes:
        rate: factor on the share of the block that the head predicts (AdaFlash's
            ``THRESHOLD_RATE``).
        minimum: shortest length in tokens, the anchor included (AdaFlash's
            ``CANDIDATE_LEN_MIN``).
        ema: how much the newest step counts in the average length of the batch.
        from_batch: requests from which the head is used; with fewer the whole block is verified.
    """

    rate: PositiveFloat = 1.0
    minimum: PositiveInt = 1
    ema: PositiveShare = 0.3
    from_batch: PositiveInt = 1


class GoodputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the policy ``goodput``: expected commits over expected time.

    Attributes:
        exploration: share of the time that may be lost in steps that are taken to learn from.
        planning: share of the time that the policy itself may take; beyond it, it learns from fewer
            steps, one in 16 at least, and keeps a plan until then.
        probe_seconds: time that may be spent at the start to measure steps; 0 measures none.
    """

    exploration: Annotated[float, msgspec.Meta(ge=0.0, le=0.1)] = 0.005
    planning: PositiveShare = 0.01
    probe_seconds: NotNegativeFloat = 10.0


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens of a draft block the target verifies.

    Attributes:
        policy: ``fixed``: the same verify length for every request and step; ``ema``: by the
            average of accepted drafts; ``adaflash``: by the drafter's length head; ``goodput``: by
            expected commits over expected time; ``custom``: by a policy of your own.
        length: of ``fixed`` only: tokens verified per request and step, the anchor included; at
            most the drafter's block size. 1 is plain decoding with no draft pass; left out: the
            whole block.
        factory: of ``custom`` only: the code that makes the policy, as ``package.module:name``; it
            is run in the server.
    """

    policy: Literal["fixed", "ema", "adaflash", "goodput", "custom"] = "fixed"
    length: PositiveInt | None = None
    factory: str | None = None
    ema: EmaConfig = EmaConfig()
    adaflash: AdaFlashConfig = AdaFlashConfig()
    goodput: GoodputConfig = GoodputConfig()

    def __post_init__(self) -> None:
        """Refuse what nothing would read; msgspec reports the ``ValueError``."""
        check_factory(
            self.factory, key="verify.factory", chooser="verify.policy", chosen=self.policy
        )
        if self.length is not None and self.policy != "fixed":
            raise ValueError(
                f'the policy "{self.policy}" chooses the length itself: leave out `verify.length`, '
                'or set `verify.policy` to "fixed"'
            )

    def width(self, block_size: int) -> int:
        """Longest verify length in tokens, anchor included, for a drafter with this block size.

        Raises:
            AdaSpecError: if the configured length is longer than the block.
        """
        if self.length is None:
            return block_size
        if self.length > block_size:
            raise AdaSpecError(
                f"verify.length is {self.length} but the drafter's block has {block_size} tokens; "
                f"set it to at most {block_size}, or leave it out to verify the whole block."
            )
        return self.length


class TapConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What verification feedback is copied out for the learner.

    Serving never waits for it: what does not fit is dropped and counted.

    Attributes:
        enabled: send feedback at all; needs a channel.
        opt_in: send it of requests only that allow it with ``"adaspec_learn": true`` among their
            ``custom_params``; otherwise of all but those that forbid it there with ``false``.
        share: share of requests that are sent, picked by their id.
        refresh_share: share of requests that do not use the prefix cache, so that the learner gets
            the features of prefixes that it does not know.
        bytes_per_second: average rate the stream of feedback is held to.
        queue_bytes: cap of what waits in memory to be sent.
        teacher: what the learner is told of the target's word on each row: ``hidden``: its last
            hidden state, of which the learner makes the logits; ``top-k``: its largest logits,
            which costs the server a sort of every row.
        top_k: target logits kept for each row, with their exact logsumexp, under ``top-k``.
        teacher_rows: rows on which the target's word is sent: those of committed tokens only, or
            of all verified tokens.
        steps_per_record: verify steps of a request that are joined into one record.
    """

    enabled: bool = False
    opt_in: bool = False
    share: Share = 1.0
    refresh_share: Share = 0.02
    bytes_per_second: PositiveFloat = 64e6
    queue_bytes: PositiveInt = 256 << 20
    teacher: Literal["hidden", "top-k"] = "hidden"
    top_k: PositiveInt = 64
    teacher_rows: Literal["committed", "verified"] = "committed"
    steps_per_record: PositiveInt = 16


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server meets its learner; `adaspec serve --online` fills in what is left out.

    Attributes:
        directory: path of the directory of the sockets, which only its owner may open
            (`adaspec learn --channel`).
        address: instead of it, of a learner on another machine: ``tcp://HOST:PORT``, the first of
            four neighbouring ports (`adaspec learn --address`); needs ``channel.keys``.
        keys: path of the server's file of keys (`adaspec keys`). With it the sockets are encrypted,
            and only versions that the learner has signed are loaded.
        store: path of the directory of the drafter versions (`adaspec learn --store`); needs a
            channel. Left out: no version is swapped in.
    """

    directory: str | None = None
    address: str | None = None
    keys: str | None = None
    store: str | None = None

    @property
    def is_used(self) -> bool:
        """Whether there is a channel."""
        return self.directory is not None or self.address is not None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; msgspec reports the ``ValueError``."""
        if self.directory is not None and self.address is not None:
            raise ValueError(
                "a channel is a directory or an address: leave out `channel.directory` or "
                "`channel.address`"
            )
        if self.address is not None and self.keys is None:
            raise ValueError(
                "`channel.address` needs `channel.keys`, since whoever reaches it could read what "
                "users say: make some with `adaspec keys`"
            )


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a version that was swapped in is given up again.

    Attributes:
        window_tokens: where there is no control: committed tokens of traffic just before the swap
            that a version is compared with, and those after which the comparison ends. 0 watches
            nothing and runs no control.
        max_fall: relative fall of the committed tokens per target pass that is tolerated.
        confidence: how sure it must be that the fall exceeds ``max_fall``.
        control_share: share of steps that draft with the frozen base, for comparison; 0: none.
    """

    window_tokens: Annotated[int, msgspec.Meta(ge=0)] = 8192
    max_fall: Share = 0.05
    confidence: Annotated[float, msgspec.Meta(ge=0.5, lt=1.0)] = 0.99
    control_share: Annotated[float, msgspec.Meta(ge=0.0, le=0.5)] = 1 / 32


class AdaSpecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a server started with ``--speculative-algorithm ADASPEC`` reads."""

    verify: VerifyConfig = VerifyConfig()
    tap: TapConfig = TapConfig()
    channel: ChannelConfig = ChannelConfig()
    watch: WatchConfig = WatchConfig()

    def __post_init__(self) -> None:
        """Refuse combinations that would do nothing; msgspec reports the ``ValueError``."""
        if not self.channel.is_used and (self.tap.enabled or self.channel.store is not None):
            raise ValueError(
                "feedback and versions travel through a channel: set `channel.directory` or "
                "`channel.address`, or leave out `tap.enabled` and `channel.store`"
            )


def load_config(path: Path) -> AdaSpecConfig:
    """Read and check a configuration file.

    Raises:
        AdaSpecError: if the file is missing, is not TOML, or holds an unknown key or a bad value.
    """
    return read_settings(
        path,
        AdaSpecConfig,
        "the AdaSpec configuration",
        f"check the path given in {CONFIG_ENVIRONMENT_VARIABLE}",
    )


def write_config(config: AdaSpecConfig, path: Path) -> None:
    """Write a file that `load_config` reads back as ``config``.

    Raises:
        OSError: if the file cannot be written.
    """
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines += _toml_table(section, values)
    path.write_text("\n".join(lines) + "\n")


def _toml_table(name: str, values: dict[str, Any]) -> list[str]:
    # Strings, numbers and booleans are written alike in JSON and TOML.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, dict)
    ]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _toml_table(f"{name}.{key}", value)
    return [f"[{name}]", *lines]


def config_from_environment() -> AdaSpecConfig:
    """The configuration named by ``ADASPEC_CONFIG``, or the defaults if it is unset or empty."""
    path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    return load_config(Path(path)) if path else AdaSpecConfig()
