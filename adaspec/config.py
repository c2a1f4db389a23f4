"""The runtime configuration: one typed TOML file, named by the variable ADASPEC_CONFIG.

SGLang's command line stays stock; what AdaSpec adds is set here. Unknown keys, wrong types and
impossible values are refused at start with the key and the file named.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from adaspec.errors import AdaSpecError

CONFIG_ENVIRONMENT_VARIABLE = "ADASPEC_CONFIG"

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens of a draft block the target verifies.

    Attributes:
        policy: ``fixed``: the same verify length for every request and step.
        length: tokens verified per request and step, the anchor included (1 is plain decoding with
            no draft pass). ``None`` verifies the drafter's whole block.
    """

    policy: Literal["fixed"] = "fixed"
    length: PositiveInt | None = None

    def width(self, block_size: int) -> int:
        """Verify length in tokens, anchor included, for a drafter with this block size.

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


class AdaSpecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a server started with ``--speculative-algorithm ADASPEC`` reads."""

    verify: VerifyConfig = VerifyConfig()


def load_config(path: Path) -> AdaSpecConfig:
    """Read and check a configuration file.

    Raises:
        AdaSpecError: if the file is missing, is not TOML, or holds an unknown key or a bad value.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=AdaSpecConfig)
    except OSError as error:
        raise AdaSpecError(
            f"cannot read the AdaSpec configuration {path}: {error.strerror}; "
            f"check the path given in {CONFIG_ENVIRONMENT_VARIABLE}."
        ) from error
    except msgspec.DecodeError as error:  # ValidationError is a subclass
        raise AdaSpecError(f"the AdaSpec configuration {path} is not valid: {error}.") from error


def config_from_environment() -> AdaSpecConfig:
    """The configuration named by ``ADASPEC_CONFIG``, or the defaults if it is unset or empty."""
    path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    return load_config(Path(path)) if path else AdaSpecConfig()
