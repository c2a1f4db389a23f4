"""No module of ours turns data into code: nothing is unpickled, evaluated or given to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adaspec", "online", "sglang_patches", "benchmarks")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MODULES_THAT_UNPICKLE = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle"),
    *("marshal", "shelve"),
}
EVALUATING = {"eval", "exec", "__import__"}
NEVER_CALLED = {
    *("torch.package.PackageImporter", "torch.jit.load", "numpy.lib.format.read_array"),
    *("pandas.read_pickle", "os.system", "os.popen", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
    *(f"builtins.{name}" for name in EVALUATING),
}
# Whatever the socket or connection is called.
NEVER_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized_pyobj"}
SHELLS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}


def dangers(source: str) -> list[str]:
    """What this module does that it must not, each with its line."""
    tree = ast.parse(source)
    names = _imported(tree)
    found = [(node.lineno, message) for node in ast.walk(tree) for message in _of_node(node, names)]
    return [f"line {line}: {message}" for line, message in sorted(found)]


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name to what it was imported as, wherever in the module."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _of_node(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import():
            modules = [alias.name for alias in node.names]
            yield from (f"imports {m}" for m in modules if _unpickles(m))
        case ast.ImportFrom(module=str(module), level=0):
            whole = [f"{module}.{alias.name}" for alias in node.names]
            yield from (f"imports {name}" for name in whole if _unpickles(name))
            yield from (f"imports {name}" for name in whole if name in NEVER_CALLED)
        case ast.Attribute(attr=attr) if attr in NEVER_METHODS:
            yield f"uses {attr}"
        case ast.Attribute() | ast.Name() if isinstance(node.ctx, ast.Load):
            name = _name(node, names)
            # `module.eval()` of PyTorch is a method; the builtin has no dot, or an alias.
            if name in EVALUATING | NEVER_CALLED or _unpickles(name.partition(".")[0]):
                yield f"uses {name}"
        case ast.Call():
            yield from _of_call(node, names)


def _of_call(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    name = _name(call.func, names)
    words = {word.arg: word.value for word in call.keywords}
    if name in ("torch.load", "torch.serialization.load") and not _is(words, "weights_only", True):
        yield "calls torch.load without weights_only=True"
    if name == "numpy.load" and not _is(words, "allow_pickle", False, absent=True):
        yield "calls numpy.load with allow_pickle"
    if name in SHELLS and not _is(words, "shell", False, absent=True):
        yield f"calls {name} with a shell"
    if name == "importlib.import_module" and any(
        isinstance(part, ast.Constant) and _unpickles(str(part.value)) for part in call.args
    ):
        yield "imports a module that unpickles"


def _is(words: dict[str | None, ast.expr], name: str, value: bool, *, absent: bool = False) -> bool:
    """Whether this argument is literally ``value``; ``absent`` where it is not given."""
    if None in words:  # `**options` may hold anything
        return False
    if name not in words:
        return absent
    given = words[name]
    return isinstance(given, ast.Constant) and given.value is value


def _name(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name, by what it was imported as; "" for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def _unpickles(module: str) -> bool:
    return module.partition(".")[0] in MODULES_THAT_UNPICKLE or module == "torch.package"


def test_modules_are_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_turns_data_into_code(path: Path) -> None:
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import pickle", "imports pickle"),
        ("import pickle as p", "imports pickle"),
        ("from pickle import loads", "imports pickle.loads"),
        ("def f():\n    import cloudpickle", "imports cloudpickle"),
        ("import dill.source", "imports dill.source"),
        ("import marshal", "imports marshal"),
        ("from shelve import open", "imports shelve.open"),
        ("import importlib\nimportlib.import_module('pickle')", "imports a module that unpickles"),
        ("import torch\ntorch.load(path)", "calls torch.load"),
        ("import torch\ntorch.load(path, weights_only=False)", "calls torch.load"),
        ("import torch\ntorch.load(path, weights_only=safe)", "calls torch.load"),
        ("import torch\ntorch.load(path, **options)", "calls torch.load"),
        ("from torch import load as l\nl(path)", "calls torch.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "calls numpy.load"),
        ("import numpy\nnumpy.load(path, **options)", "calls numpy.load"),
        ("from numpy import load\nload(path, allow_pickle=flag)", "calls numpy.load"),
        ("record = socket.recv_pyobj()", "uses recv_pyobj"),
        ("self.sockets[0].send_pyobj(record)", "uses send_pyobj"),
        ("eval(text)", "uses eval"),
        ("run = exec", "uses exec"),
        ("import builtins\nbuiltins.exec(text)", "uses builtins.exec"),
        ("from builtins import eval as e", "imports builtins.eval"),
        ("import yaml\nyaml.load(text, yaml.SafeLoader)", "uses yaml.load"),
        ("from yaml import load", "imports yaml.load"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "calls subprocess.run"),
        ("from subprocess import Popen\nPopen('ls', shell=flag)", "calls subprocess.Popen"),
        ("import os\nos.system('ls')", "uses os.system"),
    ],
)
def test_what_turns_data_into_code_is_seen(source: str, message: str) -> None:
    seen = dangers(source)
    assert seen
    assert any(message in each for each in seen), seen


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)\nnp.load(path, allow_pickle=False)",
        "model.eval()\nself.exec(step)\nmsgspec.json.decode(text)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)\nsubprocess.run(['ls'])",
        "import yaml\nyaml.safe_load(text)",
        "socket.recv_multipart()\nname = 'pickle'",
        "from .pickle import jar",
    ],
)
def test_anything_else_is_let_be(source: str) -> None:
    assert dangers(source) == []
