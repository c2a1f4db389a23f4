"""The ways of serving that a benchmark compares, by name."""

from dataclasses import dataclass
from pathlib import Path

from adaspec.errors import AdaSpecError
from adaspec.load.launch import ServerSpec

_NAMES = "plain, dflash, adaspec (whole block) or adaspec-N (N tokens verified)"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to serve the same target.

    Attributes:
        algorithm: SGLang's ``--speculative-algorithm``; ``None`` is plain decoding.
        verify_length: tokens the target verifies per request and step; ``None`` is the whole block.
    """

    name: str
    algorithm: str | None = None
    verify_length: int | None = None

    def server(
        self,
        *,
        target: str,
        drafter: str,
        port: int,
        directory: Path,
        dtype: str | None = None,
        extra: tuple[str, ...] = (),
    ) -> ServerSpec:
        """The stock command line; everything but speculation is the same for every contender.

        Args:
            directory: where the configuration file that sets the verify length is written.
        """
        config = None
        if self.verify_length is not None:
            config = directory / f"{self.name}.toml"
            config.write_text(f"[verify]\nlength = {self.verify_length}\n")
        return ServerSpec(
            target=target,
            port=port,
            drafter=None if self.algorithm is None else drafter,
            algorithm=self.algorithm or "",
            dtype=dtype,
            config=config,
            extra=extra,
        )


def parse_contender(name: str) -> Contender:
    """The contender called ``name``.

    Raises:
        AdaSpecError: if there is none of that name.
    """
    kind, dash, length = name.partition("-")
    if name in ("plain", "dflash", "adaspec"):
        return Contender(name=name, algorithm=None if name == "plain" else name.upper())
    if kind == "adaspec" and dash and length.isdecimal() and int(length) > 0:
        return Contender(name=name, algorithm="ADASPEC", verify_length=int(length))
    raise AdaSpecError(f"{name!r} names no way of serving; use {_NAMES}.")
