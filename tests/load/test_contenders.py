"""Names of contenders, and the command lines they stand for."""

from pathlib import Path

import pytest

from adaspec.config import load_config
from adaspec.errors import AdaSpecError
from adaspec.load.contenders import parse_contender
from adaspec.load.launch import ServerSpec


def server(name: str, directory: Path) -> ServerSpec:
    return parse_contender(name).server(
        target="T", drafter="D", port=1, directory=directory, extra=("--x",)
    )


def test_plain_has_no_drafter(tmp_path: Path) -> None:
    assert server("plain", tmp_path).drafter is None


@pytest.mark.parametrize("name", ["dflash", "adaspec", "adaspec-4"])
def test_contenders_differ_in_nothing_but_speculation(name: str, tmp_path: Path) -> None:
    command = server(name, tmp_path).command()
    start = command.index("--speculative-algorithm")
    assert command[start + 1] == name.partition("-")[0].upper()
    assert command[:start] + command[start + 4 :] == server("plain", tmp_path).command()


def test_verify_length_is_set_in_a_valid_configuration(tmp_path: Path) -> None:
    config = server("adaspec-4", tmp_path).config
    assert config is not None
    assert load_config(config).verify.length == 4
    assert server("adaspec", tmp_path).config is None


def test_goodput_is_a_policy(tmp_path: Path) -> None:
    config = server("adaspec-goodput", tmp_path).config
    assert config is not None
    assert load_config(config).verify.policy == "goodput"


def test_ngram_needs_no_drafter(tmp_path: Path) -> None:
    spec = server("ngram", tmp_path)
    assert spec.drafter is None
    assert spec.extra == ("--speculative-algorithm", "NGRAM", "--x")


@pytest.mark.parametrize("name", ["eagle", "adaspec-", "adaspec-0", "adaspec-x", "dflash-4", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(AdaSpecError, match="names no way of serving"):
        parse_contender(name)
