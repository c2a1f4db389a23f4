"""The plugin's entry point: what it leaves behind in a process of SGLang."""

import sys
from types import TracebackType

import pytest

from adaspec.errors import AdaSpecError
from sglang_patches import plugin

Shown = list[type[BaseException]]


@pytest.fixture
def shown_upstream(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Kinds of the exceptions that reach the hook that was there before the plugin."""
    kinds: Shown = []

    def before(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        kinds.append(kind)

    monkeypatch.setattr(sys, "excepthook", before)
    plugin._show_user_errors_plainly()
    return kinds


def raise_through_hook(error: BaseException) -> None:
    try:
        raise error
    except type(error) as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)


def test_a_user_error_is_one_line(
    shown_upstream: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_through_hook(AdaSpecError("the drafter does not fit."))
    assert capsys.readouterr().err == "adaspec.errors.AdaSpecError: the drafter does not fit.\n"
    assert shown_upstream == []


def test_any_other_error_keeps_its_traceback(shown_upstream: Shown) -> None:
    raise_through_hook(ValueError("a bug"))
    assert shown_upstream == [ValueError]
