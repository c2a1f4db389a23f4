"""Code of the user's own that a configuration names as ``package.module:name``.

Whoever may write the configuration may thereby run code in the process that reads it; nothing that
comes over the network names any.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from adaspec.errors import AdaSpecError


def check_factory(factory: str | None, *, key: str, chooser: str, chosen: str) -> None:
    """Refuse a choice of ``custom`` without code, code without that choice, and a bad name.

    For a configuration's own checks, before anything is imported.

    Args:
        factory: the value of the setting ``key``.
        key: as in ``verify.factory``.
        chooser: the setting that makes ``key`` count, as in ``verify.policy``.
        chosen: its value.

    Raises:
        ValueError: one sentence; msgspec reports it with the place in the file.
    """
    if chosen == "custom" and factory is None:
        raise ValueError(
            f'`{chooser}` is "custom", so code of yours has to be named: set `{key}` to '
            '"package.module:name"'
        )
    if factory is None:
        return
    if chosen != "custom":
        raise ValueError(
            f'`{key}` is read only with `{chooser}` = "custom": set that, or leave out `{key}`'
        )
    module, _, name = factory.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(
            f'`{key}` is "{factory}", which is not of the form "package.module:name": name the '
            "module as in an import, and behind the colon what it defines"
        )


def load_factory(factory: str, key: str) -> Callable[..., Any]:
    """Import what a setting names.

    What the module itself raises while it is imported is passed on, since its traceback says more
    than a sentence could.

    Args:
        factory: of a form that `check_factory` accepts.
        key: the setting, for errors.

    Raises:
        AdaSpecError: if there is no such module or no such name in it, or it cannot be called.
    """
    module, _, name = factory.partition(":")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise AdaSpecError(
            f'{key} is "{factory}", but there is no module {error.name}; install it beside '
            "AdaSpec, or add its directory to PYTHONPATH."
        ) from error
    # Only now, so that an AttributeError is not one of the module's own.
    try:
        found: object = pkgutil.resolve_name(factory)
    except AttributeError as error:
        raise AdaSpecError(
            f'{key} is "{factory}", but the module {module} has no {name}; correct the name.'
        ) from error
    if not callable(found):
        raise AdaSpecError(
            f'{key} is "{factory}", which is of type {type(found).__name__} and cannot be called; '
            "name a function or a class."
        )
    return found


def make_custom(factory: str, key: str, members: Sequence[str], *arguments: object) -> Any:
    """Call what a setting names, and check what it returns.

    Args:
        members: names that the result must have.
        arguments: of the call.

    Returns:
        An object with all ``members``.

    Raises:
        AdaSpecError: as `load_factory`, or if the result lacks a member.
    """
    made = load_factory(factory, key)(*arguments)
    missing = [name for name in members if not hasattr(made, name)]
    if missing:
        raise AdaSpecError(
            f'{key} is "{factory}", which returned an object of type {type(made).__name__} '
            f"without {', '.join(missing)}; let it return one that has all of "
            f"{', '.join(members)}."
        )
    return made


def members_of(protocol: type) -> tuple[str, ...]:
    """Names that a protocol asks for, in its order."""
    return tuple(name for name in vars(protocol) if not name.startswith("_"))
