"""What our modules take from SGLang, read off their own syntax trees.

A list of names kept by hand forgets the next one; these functions find every call of an imported
function, and every attribute read from an object of a known upstream class.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of something imported from SGLang: ``*args`` positional, ``keywords`` by name."""

    module: str
    name: str
    positional: int
    keywords: tuple[str, ...]


def tree(module: ModuleType) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(Path(inspect.getfile(module)).read_text())


def imports(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Local name to (SGLang module, name) of every ``from sglang… import name``, nested or not."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang.")
        for alias in node.names
    }


def resolve(module: str, name: str) -> Any:
    """The object behind an import."""
    return getattr(importlib.import_module(module), name)


def calls(module: ModuleType) -> Iterator[Call]:
    """Calls of imported functions, classes and their methods (``Imported.method(…)``)."""
    names = imports(module)
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.Call) or any(k.arg is None for k in node.keywords):
            continue
        path = ast.unparse(node.func).split(".")
        if path[0] in names:
            source, name = names[path[0]]
            yield Call(
                source,
                ".".join([name, *path[1:]]),
                len(node.args),
                tuple(str(k.arg) for k in node.keywords),
            )


def method_calls(module: ModuleType, receivers: Mapping[str, type]) -> Iterator[tuple[type, Call]]:
    """Calls ``receiver.method(…)`` of objects whose class is known."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            cls = receivers.get(ast.unparse(node.func.value))
            if cls is not None:
                words = tuple(str(k.arg) for k in node.keywords)
                yield cls, Call(cls.__module__, node.func.attr, len(node.args), words)


def attributes(module: ModuleType, receivers: Mapping[str, type]) -> set[tuple[type, str]]:
    """(class, attribute) of every ``receiver.attribute`` in the module."""
    return {
        (receivers[ast.unparse(node.value)], node.attr)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in receivers
    }


@functools.cache
def members(cls: type) -> frozenset[str]:
    """Methods, properties, fields and attributes assigned in methods, bases included."""
    names = set(dir(cls))
    for base in cls.__mro__[:-1]:
        names |= set(getattr(base, "__annotations__", {}))
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # a base written in C
            continue
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return frozenset(names)
