"""A hook of MkDocs: tables of settings, made of the typed configuration and its docstrings.

A line ``<!-- settings: package.module.Struct -->`` in a page is replaced by the tables of a struct: one
of its own keys, and one for each section.
"""  # noqa: E501

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


def tables(struct: type[msgspec.Struct]) -> str:
    """Markdown tables of a struct whose fields are values or sections."""
    fields = msgspec.structs.fields(struct)
    sections = {f.encode_name: f.type for f in fields if _is_section(f.type)}
    own = [f for f in fields if f.encode_name not in sections]
    parts = [_table(struct, own)] if own else []
    for name, section in sections.items():
        about = inspect.cleandoc(section.__doc__ or "").partition("\n\nAttributes:")[0]
        keys = list(msgspec.structs.fields(section))
        parts.append(f"## `[{name}]`\n\n{_prose(about)}\n\n{_table(section, keys)}")
    return "\n\n".join(parts)


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
        lines.append(f"| `{name}` | {values} | `{_literal(field.default)}` | {meaning} |")
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
