"""docs/train.md names every key of the training configuration, with its default."""

import re
from pathlib import Path

import msgspec
import pytest

from adaspec.training.config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
SECTIONS = {
    field.name: field.type
    for field in msgspec.structs.fields(TrainConfig)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}


@pytest.mark.parametrize("section", ["Top level", *SECTIONS])
def test_keys_and_defaults_are_documented(section: str) -> None:
    title = f"`[{section}]`" if section in SECTIONS else section
    table = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n#")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    fields = msgspec.structs.fields(SECTIONS.get(section, TrainConfig))
    expected = {f.name: f.default for f in fields if f.name not in SECTIONS}
    assert list(rows) == list(expected)
    for key, default in expected.items():
        shown = rows[key].strip("`")
        if isinstance(default, bool | str):
            assert shown == msgspec.json.encode(default).decode()
        elif default is not None:
            assert float(shown) == default
