"""The documents agree with the code: keys, options, links."""

import importlib.util
import inspect
import re
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

import online.command
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


SELF_EXPLAINING = {"beta1", "beta2", "weight_decay"}


def sections(struct: type[msgspec.Struct], path: str = "") -> dict[str, type[msgspec.Struct]]:
    """Every struct of a configuration by its dotted path, itself by the empty one."""
    found = {path: struct}
    for field in msgspec.structs.fields(struct):
        if inspect.isclass(field.type) and issubclass(field.type, msgspec.Struct):
            found |= sections(field.type, f"{path}.{field.encode_name}".lstrip("."))
    return found


@pytest.mark.parametrize(
    ("page", "config"),
    [("configuration.md", AdaSpecConfig), ("learner-settings.md", LearnConfig)],
    ids=["server", "learner"],
)
def test_every_setting_is_explained_and_in_the_table_of_its_section(
    page: str, config: type[msgspec.Struct]
) -> None:
    made = settings_tables.on_page_markdown((ROOT / "docs" / page).read_text())
    bodies = {"": made.partition("\n## ")[0]}
    for title, body in re.findall(
        r"^##+ `\[([\w.]+)\]`\n(.*?)(?=^#|\Z)", made, re.MULTILINE | re.DOTALL
    ):
        assert title not in bodies
        bodies[title] = body
    structs = sections(config)
    assert list(bodies) == list(structs)
    for path, struct in structs.items():
        names = [
            field.encode_name
            for field in msgspec.structs.fields(struct)
            if f"{path}.{field.encode_name}".lstrip(".") not in structs
        ]
        explained = settings_tables.meanings(struct)
        assert all(explained.values()), struct
        assert set(explained) <= set(names), struct
        assert set(names) - set(explained) <= SELF_EXPLAINING, struct
        rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| (.+) \|$", bodies[path], re.MULTILINE)
        assert [name for name, _ in rows] == names, struct
        assert all(explained.get(name, meaning) == meaning for name, meaning in rows)
        if path:
            assert not bodies[path].strip().startswith("|"), f"{path} says nothing of itself"


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("configuration.md", "| `length` | whole number, from 1 | left out |"),
        ("configuration.md", '| `teacher` | `"hidden"`, `"top-k"` | `"hidden"` |'),
        ("configuration.md", "| `confidence` | number, from 0.5, below 1 | `0.99` |"),
        (
            "learner-settings.md",
            '| `kind` | `"adaflash"`, `"custom"`, `"osd"`, `"survival"` | `"adaflash"` |',
        ),
        ("learner-settings.md", "| `cpus` | a list: whole number, from 0 | `[]` |"),
    ],
)
def test_values_and_defaults_are_those_of_the_code(page: str, row: str) -> None:
    assert row in settings_tables.on_page_markdown((ROOT / "docs" / page).read_text())


def test_the_example_configurations_are_accepted() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert examples
    for text in (*examples, (ROOT / "examples" / "adaspec.toml").read_text()):
        assert msgspec.toml.decode(text, type=AdaSpecConfig) != AdaSpecConfig()


def test_what_shows_compatibility_exists() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [row.split("|")[1:-1] for row in page.splitlines() if re.match(r"\| (?!\*\*)", row)]
    assert {len(row) for row in rows} == {5}
    assert all(row[-1].strip() for row in rows)
    shown = " ".join(row[-1] for row in rows)
    for path in re.findall(r"`([\w/]+\.py)`", shown):
        assert (ROOT / "tests" / path).exists(), path
    code = "".join(
        file.read_text()
        for folder in ("tests", "sglang_patches", "adaspec/drafters")
        for file in (ROOT / folder).rglob("*.py")
    )
    for name in re.findall(r"`(?:\w+\.)?(_?[a-z]\w*_\w+)`", shown):
        assert f"def {name}(" in code, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    commands = get_command(app).commands
    learner = {f"--{name}" for name in inspect.signature(online.command.learn).parameters}
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
    for name, rest in re.findall(r"\badaspec (\w+)([^\n&]*)", blocks.replace("\\\n", "")):
        # `adaspec learn` hands its options to a program of its own.
        known = {option for p in commands[name].params for option in p.opts} or learner
        ours = rest.partition(" -- ")[0]
        assert set(re.findall(r"(?<=\s)-{1,2}[a-z][\w-]*", ours)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
