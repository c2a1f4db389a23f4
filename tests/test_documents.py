"""The documents agree with the code: keys, options, links."""

import re
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

from adaspec.cli.main import app
from adaspec.config import AdaSpecConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_configuration_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for section in msgspec.structs.fields(AdaSpecConfig):
        _, _, body = text.partition(f"## `[{section.name}]`")
        table = body.partition("\n## ")[0]
        documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert documented == [f.encode_name for f in msgspec.structs.fields(section.type)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    commands = get_command(app).commands
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
    for name, rest in re.findall(r"\badaspec (\w+)([^\n&]*)", blocks.replace("\\\n", "")):
        known = {option for p in commands[name].params for option in p.opts}
        ours = rest.partition(" -- ")[0]
        assert set(re.findall(r"(?<=\s)-{1,2}[a-z][\w-]*", ours)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
