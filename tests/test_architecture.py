"""Rules about the whole repository: who imports whom, module size, leftovers, pinned packages."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# Written so that no pattern matches its own text.
FORBIDDEN = {
    "unfinished work": r"\b(TO[D]O|FIX[M]E|X[X]X)\b",
    "a package registry's host": r"(pypi|pythonhosted)[.]org",
    "a path of one machine": r"(?<![\w.~-])/(root|home|wor[k]|opt/ve[n]v)/",
    "the tracker's tooling": r"\bissues (show|list|close)\b",
}


@cache
def tracked(*patterns: str) -> tuple[Path, ...]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return tuple(ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file())


def test_import_rule() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


def test_modules_stay_small() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {path.name: size for path, size in sizes.items() if size >= MAX_LINES} == {}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_no_file_mentions(reason: str) -> None:
    pattern = re.compile(FORBIDDEN[reason])
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # weights and pictures
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_every_declared_package_is_locked() -> None:
    def name(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {name(r) for r in (*project["dependencies"], *extras["dev"], *extras["docs"])}
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {name(line) for line in lock if not line.startswith("#")}
    assert declared - pinned == set()
    assert all("==" in line for line in lock if line and not line.startswith("#"))
