"""The documents agree with the code: keys, options, links."""

import importlib.util
import inspect
import re
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

from adaspec.cli.main import app
from adaspec.config import AdaSpecConfig
from online.config import LearnConfig

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "settings_tables.py")
assert _SPEC is not None
assert _SPEC.loader is not None
settings_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(settings_tables)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_configuration_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for section in msgspec.structs.fields(AdaSpecConfig):
        _, _, body = text.partition(f"## `[{section.name}]`")
        table = body.partition("\n## ")[0]
        documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert documented == [f.encode_name for f in msgspec.structs.fields(section.type)]


def test_every_key_of_the_learner_is_explained_and_in_the_table() -> None:
    sections = [f.type for f in msgspec.structs.fields(LearnConfig) if inspect.isclass(f.type)]
    for section in (LearnConfig, *(s for s in sections if issubclass(s, msgspec.Struct))):
        names = {f.encode_name for f in msgspec.structs.fields(section)}
        explained = settings_tables.meanings(section).keys()
        plain = {f.name for f in msgspec.structs.fields(LearnConfig) if f.type in sections}
        self_explaining = {"beta1", "beta2", "weight_decay"} | plain
        assert explained <= names
        assert names - explained <= self_explaining, section
    page = (ROOT / "docs" / "learner-settings.md").read_text()
    made = settings_tables.on_page_markdown(page)
    keys = re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+?)` \| (.+?) \|$", made, re.MULTILINE)
    expected = sum(
        len(msgspec.structs.fields(s)) for s in sections if issubclass(s, msgspec.Struct)
    )
    assert len(keys) >= expected
    assert ("kind", '`"adaflash"`, `"osd"`, `"survival"`', '"adaflash"') in {k[:3] for k in keys}


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
