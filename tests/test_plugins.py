"""Code that a configuration names: what is imported, and the one sentence each mistake gets."""

from pathlib import Path
from typing import Protocol

import pytest

from adaspec.config import AdaSpecConfig, VerifyConfig, load_config, write_config
from adaspec.errors import AdaSpecError
from adaspec.plugins import load_factory, make_custom, members_of
from online.config import LearnConfig, load_learn_config

MODULE = """
class Outer:
    @staticmethod
    def make(*values):
        return values

number = 7
"""


class Sized(Protocol):
    width: int

    @property
    def height(self) -> int: ...

    def area(self) -> int: ...


@pytest.fixture(autouse=True)
def module(own_code: Path) -> None:
    (own_code / "own.py").write_text(MODULE)
    (own_code / "needy.py").write_text("import not_there\n")
    (own_code / "broken.py").write_text("import sys\nsys.not_there\n")


def test_a_name_is_found_and_called_with_the_arguments() -> None:
    assert load_factory("own:Outer.make", "verify.factory")(1, 2) == (1, 2)
    assert make_custom("own:Outer.make", "verify.factory", ("count", "index"), 3) == (3,)


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("nowhere.at_all:make", "no module nowhere; install"),
        ("needy:make", "no module not_there; install"),
        ("own.inner:make", "no module own.inner; install"),
        ("own:mkae", "the module own has no mkae"),
        ("own:Outer.mkae", "the module own has no Outer.mkae"),
        ("own:number", "of type int and cannot be called"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_sentence(factory: str, named: str) -> None:
    with pytest.raises(AdaSpecError) as refused:
        load_factory(factory, "verify.factory")
    assert str(refused.value).startswith(f'verify.factory is "{factory}", ')
    assert named in str(refused.value)


def test_an_error_inside_the_module_is_not_taken_for_a_wrong_name() -> None:
    with pytest.raises(AttributeError, match="not_there"):
        load_factory("broken:make", "verify.factory")


def test_a_result_without_members_is_refused_with_those_that_are_missing() -> None:
    assert members_of(Sized) == ("height", "area")
    with pytest.raises(AdaSpecError, match=r"type tuple without height, area; .* count, height, a"):
        make_custom("own:Outer.make", "verify.factory", ("count", *members_of(Sized)))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{chooser} = "custom"', "set `{key}` to"),
        ('{factory} = "own:make"', "or leave out `{key}`"),
        ('{chooser} = "custom"\n{factory} = "own.make"', '"own.make", which is not of the form'),
        ('{chooser} = "custom"\n{factory} = "own:"', '"own:", which is not of the form'),
        ('{chooser} = "custom"\n{factory} = ":make"', '":make", which is not of the form'),
        ('{chooser} = "custom"\n{factory} = "a/b.py:c"', "which is not of the form"),
        ('{chooser} = "custom"\n{factory} = "a:b:c"', "which is not of the form"),
        ('{chooser} = "custom"\n{factory} = ""', "which is not of the form"),
    ],
)
@pytest.mark.parametrize("section", ["verify", "objective"])
def test_settings_that_name_no_code_are_refused_at_the_door(
    tmp_path: Path, section: str, line: str, told: str
) -> None:
    chooser = {"verify": "policy", "objective": "kind"}[section]
    path = tmp_path / "a.toml"
    path.write_text(f"[{section}]\n{line.format(chooser=chooser, factory='factory')}\n")
    with pytest.raises(AdaSpecError, match=r"a\.toml is not valid") as refused:
        load_config(path) if section == "verify" else load_learn_config(path)
    assert told.format(key=f"{section}.factory") in str(refused.value)
    assert f"`$.{section}`" in str(refused.value)


def test_settings_that_name_code_are_read_without_importing_it(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[objective]\nkind = "custom"\nfactory = "not.there:make"\n')
    config: LearnConfig = load_learn_config(path)
    assert config.objective.factory == "not.there:make"
    written = AdaSpecConfig(verify=VerifyConfig(policy="custom", factory="not.there:make"))
    write_config(written, path)
    assert load_config(path) == written
