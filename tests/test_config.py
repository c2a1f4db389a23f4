"""The configuration file: what is read, and the one sentence each mistake gets."""

from pathlib import Path

import pytest

from adaspec.config import (
    AdaSpecConfig,
    ChannelConfig,
    TapConfig,
    VerifyConfig,
    config_from_environment,
    load_config,
    write_config,
)
from adaspec.errors import AdaSpecError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "a.toml", "")) == AdaSpecConfig()


def test_verify_length_is_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "a.toml", "[verify]\nlength = 6\n"))
    assert config.verify.width(16) == 6


def test_without_a_length_the_whole_block_is_verified() -> None:
    assert VerifyConfig().width(16) == 16


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[verify]\nlenght = 6\n", "lenght"),
        ("[verify]\nlength = 0\n", "$.verify.length"),
        ('[verify]\nlength = "6"\n', "$.verify.length"),
        ('[verify]\npolicy = "magic"\n', "magic"),
        ("[verify\n", "line 1"),
        ("\xff", "a.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(AdaSpecError, match=r"a\.toml") as caught:
        load_config(write(tmp_path / "a.toml", text))
    assert named in str(caught.value)


def test_a_missing_file_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASPEC_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(AdaSpecError, match="ADASPEC_CONFIG"):
        config_from_environment()


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"[verify]\nlength = 6 # \xff\n")
    with pytest.raises(AdaSpecError, match=r"a\.toml is not valid"):
        load_config(tmp_path / "a.toml")


def test_no_variable_means_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADASPEC_CONFIG", raising=False)
    assert config_from_environment() == AdaSpecConfig()


def test_a_length_beyond_the_block_is_refused() -> None:
    with pytest.raises(AdaSpecError, match=r"17 .* 16 tokens"):
        VerifyConfig(length=17).width(16)


@pytest.mark.parametrize("text", ["[tap]\nenabled = true\n", '[channel]\nstore = "versions"\n'])
def test_feedback_and_versions_need_a_channel(tmp_path: Path, text: str) -> None:
    with pytest.raises(AdaSpecError, match=r"channel\.directory"):
        load_config(write(tmp_path / "a.toml", text))


def test_online_sections_are_read(tmp_path: Path) -> None:
    text = '[tap]\nenabled = true\nshare = 0.5\n[channel]\ndirectory = "c"\nstore = "s"\n'
    config = load_config(write(tmp_path / "a.toml", text))
    assert (config.tap.share, config.channel.store) == (0.5, "s")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = AdaSpecConfig(
        verify=VerifyConfig(length=3),
        tap=TapConfig(enabled=True, bytes_per_second=1e7),
        channel=ChannelConfig(directory='ein "Ort"\\ähnlich 🙂'),
    )
    write_config(config, tmp_path / "a.toml")
    assert load_config(tmp_path / "a.toml") == config
