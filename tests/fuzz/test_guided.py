"""The guided search finds what blind bending does not, and keeps what it found."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import guided
from tests.fuzz.target import Target

HERE = str(Path(__file__).parent) + "/test_guided"
MOST = 40_000


def nested(data: bytes) -> bool:
    """Four conditions, of which each is met by one byte in 256."""
    if data[:1] == b"F":
        if data[1:2] == b"U":
            if data[2:3] == b"Z":
                if data[3:4] == b"Z":
                    raise ZeroDivisionError("the bug")
                return True
            return True
        return True
    return True


def change_a_byte(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data))
    return data[:place] + random.randbytes(1) + data[place + 1 :]


TOY = Target(nested, [b"    "], change_a_byte)


def looked(roots: list[str]) -> guided.Outcome:
    """Until something is found, or this is enough."""
    found: list[bytes] = []

    def check(data: bytes) -> bool:
        try:
            return nested(data)
        except ZeroDivisionError:
            found.append(data)
            raise

    target = Target(check, TOY.seeds, TOY.mutate)
    return guided.explore(
        target, Random(0), lambda executions: not found and executions < MOST, roots=roots
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The toy as a target of the command; what was closed."""
    closed: list[str] = []
    made = Target(nested, TOY.seeds, TOY.mutate, close=lambda: closed.append("toy"))
    monkeypatch.setitem(guided.TARGETS, "toy", lambda directory: made)
    yield closed
    assert closed


def test_code_that_was_reached_guides_it_to_the_bug() -> None:
    (finding,) = looked([HERE]).findings
    assert finding.data == b"FUZZ"
    assert finding.error.startswith("ZeroDivisionError in test_guided.py:")


def test_blind_bending_as_long_finds_nothing() -> None:
    outcome = looked([])
    assert outcome.executions == MOST
    assert (outcome.findings, outcome.corpus, outcome.arcs) == ([], [b"    "], 0)


def test_the_same_seed_is_the_same_search() -> None:
    assert looked([HERE]).corpus == looked([HERE]).corpus


def test_a_finding_is_saved_and_shown_again(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guided.save(tmp_path / "toy" / "corpus", b"FUZZ")
    arguments = ["toy", "--corpus", str(tmp_path)]
    assert guided.main([*arguments, "--seconds", "0"]) == 1
    *_, told, command = capsys.readouterr().out.splitlines()
    assert told == "toy: 2 executions, 2 inputs in the corpus, 0 arcs, 1 findings"
    again = command.split("python -m tests.fuzz.guided ")[1].split()
    with pytest.raises(ZeroDivisionError):
        guided.main(again)


def test_a_search_without_findings_is_a_success(toy: list[str], tmp_path: Path) -> None:
    assert guided.main(["toy", "--corpus", str(tmp_path), "--seconds", "0"]) == 0
    assert [path.read_bytes() for path in (tmp_path / "toy" / "corpus").iterdir()] == [b"    "]


@pytest.mark.parametrize("arguments", [["nothing"], ["--replay", "x"]])
def test_bad_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        guided.main(arguments)
    assert arguments[0] in capsys.readouterr().err
