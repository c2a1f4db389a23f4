"""A hook of MkDocs: tables of settings, made of the typed configuration and its docstrings.

A line ``<!-- settings: package.module.Struct -->`` in a page is replaced by the tables of a struct:
one of its own keys, and one for each section, under a heading; likewise for sections of sections.
"""

import importlib
import inspect
import re
from typing import Any

import msgspec
from msgspec import inspect as types

_MARKER = re.compile(r"^<!-- settings: ([\w.]+)\.(\w+) -->$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of a page."""
    return _MARKER.sub(lambda found: tables(_load(found[1], found[2])), markdown)


def tables(struct: type[msgspec.Struct], path: tuple[str, ...] = ()) -> str:
    """Markdown tables of a struct whose fields are values or sections; ``path`` leads to it."""
    fields = msgspec.structs.fields(struct)
    own = [field for field in fields if not _is_section(field.type)]
    parts = [_table(struct, own)] if own else []
    for field in fields:
        if _is_section(field.type):
            place = (*path, field.encode_name)
            heading = f"{'#' * (1 + len(place))} `[{'.'.join(place)}]`"
            parts += [heading, _prose(about(field.type)), tables(field.type, place)]
    return "\n\n".join(parts)


def about(struct: type[msgspec.Struct]) -> str:
    """What a struct's docstring says before its fields."""
    return inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[0].rstrip()


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What a struct's docstring says of each field that it explains."""
    text = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[2]
    pieces = _ENTRY.split(text.partition("\n\n")[0])[1:]
    found: dict[str, str] = {}
    for names, body in zip(pieces[::2], pieces[1::2], strict=True):
        found |= dict.fromkeys(names.split(", "), _prose(body))
    return found


def _table(struct: type[msgspec.Struct], fields: list[msgspec.structs.FieldInfo]) -> str:
    explained = meanings(struct)
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        name = field.encode_name
        meaning = explained.get(name, "as its name says")
        values = _values(types.type_info(field.type))
        default = "left out" if field.default is None else f"`{_literal(field.default)}`"
        lines.append(f"| `{name}` | {values} | {default} | {meaning} |")
    return "\n".join(lines)


def _values(kind: types.Type) -> str:
    """The permitted values in words."""
    if isinstance(kind, types.LiteralType):
        return ", ".join(f"`{_literal(value)}`" for value in kind.values)
    if isinstance(kind, types.BoolType):
        return "`true`, `false`"
    if isinstance(kind, types.StrType):
        return f"text like `{kind.pattern}`".replace("|", "\\|") if kind.pattern else "text"
    if isinstance(kind, types.VarTupleType):
        return f"a list: {_values(kind.item_type)}"
    if isinstance(kind, types.IntType | types.FloatType):
        word = "whole number" if isinstance(kind, types.IntType) else "number"
        bounds = {"from": kind.ge, "above": kind.gt, "to": kind.le, "below": kind.lt}
        limits = [f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None]
        return ", ".join([word, *limits])
    if isinstance(kind, types.UnionType):  # TOML has no null: a key that may be None is left out
        return " or ".join(_values(k) for k in kind.types if not isinstance(k, types.NoneType))
    raise TypeError(f"no words for the type {kind}")


def _literal(value: object) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _is_section(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, msgspec.Struct)


def _load(module: str, name: str) -> type[msgspec.Struct]:
    struct: type[msgspec.Struct] = getattr(importlib.import_module(module), name)
    return struct
