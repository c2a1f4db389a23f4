"""The ways of serving that a benchmark compares, by name."""

from dataclasses import dataclass
from pathlib import Path

from adaspec.config import AdaSpecConfig, VerifyConfig, write_config
from adaspec.errors import AdaSpecError
from adaspec.load.launch import ServerSpec

_NGRAM = "NGRAM"  # drafts from the text itself

_NAMES = (
    "plain, ngram, dflash, adaspec (whole block), adaspec-N (N tokens verified) or adaspec-goodput"
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to serve the same target.

    Attributes:
        algorithm: SGLang's ``--speculative-algorithm``; ``None`` is plain decoding.
        verify: AdaSpec's configuration of the verify length; ``None`` is the whole block.
    """

    name: str
    algorithm: str | None = None
    verify: VerifyConfig | None = None

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
        if self.verify is not None:
            config = directory / f"{self.name}.toml"
            write_config(AdaSpecConfig(verify=self.verify), config)
        drafts = self.algorithm not in (None, _NGRAM)
        if self.algorithm == _NGRAM:
            extra = ("--speculative-algorithm", _NGRAM, *extra)
        return ServerSpec(
            target=target,
            port=port,
            drafter=drafter if drafts else None,
            algorithm=(self.algorithm or "") if drafts else "",
            dtype=dtype,
            config=config,
            extra=extra,
        )


def parse_contender(name: str) -> Contender:
    """The contender called ``name``.

    Raises:
        AdaSpecError: if there is none of that name.
    """
    kind, dash, rest = name.partition("-")
    if name in ("plain", "ngram", "dflash", "adaspec"):
        return Contender(name=name, algorithm=None if name == "plain" else name.upper())
    if kind == "adaspec" and dash and rest.isdecimal() and int(rest) > 0:
        return Contender(name=name, algorithm="ADASPEC", verify=VerifyConfig(length=int(rest)))
    if name == "adaspec-goodput":
        return Contender(name=name, algorithm="ADASPEC", verify=VerifyConfig(policy="goodput"))
    raise AdaSpecError(f"{name!r} names no way of serving; use {_NAMES}.")
