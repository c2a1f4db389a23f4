"""Prompt files: the bundled one, and one sentence for each way a file can be wrong."""

from pathlib import Path

import pytest

from adaspec.errors import AdaSpecError
from adaspec.load.prompts import load_prompts


def test_bundled_prompts_are_distinct() -> None:
    prompts = load_prompts()
    assert len(set(prompts)) == len(prompts) >= 16


def test_reads_prompts_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}\n')
    assert load_prompts(file) == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 .* is not a prompt"),
        ('{"prompt": 3}\n', "line 1 .* is not a prompt"),
        ("nonsense\n", "line 1 .* is not a prompt"),
        ("\n", "holds no prompt"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(AdaSpecError, match=message):
        load_prompts(file)


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match="cannot read the prompts"):
        load_prompts(tmp_path / "none.jsonl")
