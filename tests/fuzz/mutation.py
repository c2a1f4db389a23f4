"""Valid messages bent out of shape, with their structure in view.

Random bytes hardly get past the first check of a format. Here a message is decoded, one or more of
its parts are replaced by what such a part must not be, or may just be, and it is encoded again;
or its bytes are changed, as a bad disk or line would.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

Mutation = Callable[[bytes, Random], bytes]

_INTEGERS = (-1, 0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, 0.5)
_TEXTS = ("", "\0", "\n", "\x7f", "Ω", "../../etc/passwd", "0" * 64, "x" * 300, "/", "nan", "1")
_LETTERS = b'\x00\xff"{}[]\\,:0-9\n\x7f\x80\x90\xc1\xcf\xdf'


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """A few changes of single bytes, pieces and lengths."""
    for _ in range(random.randint(1, 3)):
        place = random.randint(0, len(data))
        end = min(len(data), place + random.choice((1, 2, 4, 8, 64)))
        match random.randint(0, 6):
            case 0:
                data = data[:place]
            case 1:
                data = data[:place] + data[end:]
            case 2:
                data = data[:place] + data[place:end] + data[place:]
            case 3:
                data = data[:place] + random.randbytes(end - place) + data[end:]
            case 4:
                data = data[:place] + bytes([random.choice(_LETTERS)]) + data[place + 1 :]
            case 5:
                number = random.choice(_INTEGERS) & (2**64 - 1)
                data = data[:place] + number.to_bytes(8, "little") + data[place + 8 :]
            case _:
                data = data[:place] + bytes([random.choice(_LETTERS)]) * 2000 + data[place:]
    return data


def mutate_json(data: bytes, random: Random) -> bytes:
    """A JSON text with other values, keys or elements; NaN and endless numbers among them."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, random)
    return json.dumps(_bend(tree, random)).encode("utf-8", "surrogatepass")


def mutate_msgpack(data: bytes, random: Random) -> bytes:
    """A MessagePack message with other values; bytes in it are bent as messages of their own."""
    try:
        return msgspec.msgpack.encode(_bend(msgspec.msgpack.decode(data), random))
    except (ValueError, TypeError, RecursionError, OverflowError):
        return mutate_bytes(data, random)


def mutate_toml(data: bytes, random: Random) -> bytes:
    """A TOML text with other values behind the equals sign, or other lines."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    key, equals, _ = lines[place].partition(b"=")
    if not equals or random.random() < 0.3:
        lines[place : place + 1] = [random.choice(lines) for _ in range(random.randint(0, 2))]
    else:
        value = random.choice((*_INTEGERS, *_FLOATS, *_TEXTS, True, [], [1], {}, 10**400))
        lines[place] = key + b"= " + json.dumps(value).replace("Infinity", "inf").lower().encode()
    return b"\n".join(lines)


def mutate_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header has been bent, with its right length or another."""
    size = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + size], data[8 + size :]
    header = mutate_json(header, random)
    if random.random() < 0.2:
        size = random.choice(_INTEGERS) & (2**64 - 1)
    else:
        header += b" " * (-len(header) % 8)
        size = len(header)
    return size.to_bytes(8, "little") + header + values


def either(first: Mutation, share: float = 0.7) -> Mutation:
    """This mutation, or one of plain bytes, or one after the other."""

    def mutate(data: bytes, random: Random) -> bytes:
        choice = random.random()
        if choice < share:
            return first(data, random)
        if choice < (1 + share) / 2:
            return mutate_bytes(data, random)
        return mutate_bytes(first(data, random), random)

    return mutate


def _bend(tree: Any, random: Random) -> Any:
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        tree = _replace(tree, random.choice(list(_paths(tree))), random)
    return tree


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    parts = node.items() if isinstance(node, dict) else ()
    if isinstance(node, list):
        parts = enumerate(node[:64])
    for key, part in parts:
        found += _paths(part, (*path, key))
    return found


def _replace(node: Any, path: tuple[Any, ...], random: Random) -> Any:
    if not path:
        return _other(node, random)
    key, *rest = path
    copied = dict(node) if isinstance(node, dict) else list(node)
    copied[key] = _replace(copied[key], tuple(rest), random)
    return copied


def _other(node: Any, random: Random) -> Any:
    """Something that may stand where ``node`` stood."""
    if random.random() < 0.2:
        anything = (None, True, False, [], {}, [[]], *_INTEGERS, *_FLOATS, *_TEXTS, 10**400)
        return random.choice(anything)
    match node:
        case bool() | None:
            return random.choice((True, False, None, 1))
        case int():
            return random.choice((*_INTEGERS, node + 1, node - 1, node * 2, float(node)))
        case float():
            return random.choice((*_FLOATS, -node, node * 10, node / 10))
        case str():
            return random.choice((*_TEXTS, node[:-1], node + node, node.upper(), node + "\n"))
        case bytes():
            return random.choice((mutate_msgpack, mutate_bytes))(node, random)
        case list():
            return _other_list(node, random)
        case dict():
            return _other_dict(node, random)
    return None


def _other_list(node: list[Any], random: Random) -> list[Any]:
    place = random.randint(0, len(node))
    match random.randint(0, 4):
        case 0:
            return node[:place] + node[place + 1 :]
        case 1:
            return node[:place] + node[place : place + 1] + node[place:]
        case 2:
            return random.sample(node, len(node))
        case 3:
            return node * random.choice((2, 8, 40))
    return [node] * random.randint(0, 3)


def _other_dict(node: dict[Any, Any], random: Random) -> dict[Any, Any]:
    if not node:
        return {"extra": 1}
    key, other = random.choice(list(node)), random.choice(list(node))
    match random.randint(0, 4):
        case 0:
            return {name: value for name, value in node.items() if name != key}
        case 1:
            return node | {random.choice(("extra", "", "__class__", "$ref", f"{key}x")): node[key]}
        case 2:
            return node | {key: node[other], other: node[key]}
        case 3:
            deep: Any = node[key]
            for _ in range(random.choice((3, 300))):
                deep = [deep]
            return node | {key: deep}
    return {name: value for name, value in random.sample(list(node.items()), len(node))}
