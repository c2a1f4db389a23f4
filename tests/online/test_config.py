from pathlib import Path

import pytest

from adaspec.errors import AdaSpecError
from online.config import LearnConfig, load_learn_config


def load(path: Path, text: str) -> LearnConfig:
    path.write_text(text)
    return load_learn_config(path)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path / "learn.toml", "") == LearnConfig()


def test_values_are_read(tmp_path: Path) -> None:
    config = load(
        tmp_path / "learn.toml",
        'mode = "full"\n[process]\ndevice = "cuda:1"\ncpus = [0]\n[objective]\nalpha = 0.5\n',
    )
    assert (config.mode, config.process.device, config.objective.alpha) == ("full", "cuda:1", 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "unknown = 1",
        "[objective]\nalhpa = 0.5",
        "[objective]\nalpha = 1.5",
        "[process]\ndevice = 'tpu'",
        "mode = 'half'",
        "[gate]\nconfidence = 1.0",
        "not toml",
    ],
)
def test_bad_files_are_refused_with_their_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(AdaSpecError, match=r"learn\.toml is not valid"):
        load(tmp_path / "learn.toml", text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match=r"missing\.toml"):
        load_learn_config(tmp_path / "missing.toml")
