"""Only ``checkpoint/storage/`` does file I/O, so that other stores can stand beside files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gracepoint.checkpoint

PACKAGE = Path(next(iter(gracepoint.checkpoint.__path__)))
#: Modules that reach files, or by whose name any module can be loaded.
FILE_MODULES = frozenset({"fcntl", "glob", "importlib", "io", "mmap", "os", "pathlib", "shutil", "tempfile"})
#: What numpy reads and writes files with. Names that other libraries have, too, count only as numpy's own.
NUMPY_FILES = frozenset({"fromfile", "genfromtxt", "loadtxt", "memmap", "open_memmap", "savetxt", "tofile"})
ONLY_OF_NUMPY = frozenset({"DataSource", "load", "save", "savez", "savez_compressed"})
#: What is found in modules that may use it, and why.
EXCEPTIONS = {
    Path("__init__.py"): ["importlib"],  # a public name loads its module when it is first used
    Path("format/pytree.py"): ["memmap"],  # a type of array that is recognized: nothing is opened
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if PACKAGE / "storage" not in path.parents)


def file_access_in(source: str) -> list[str]:
    """Returns where ``source`` reaches files: imports, built-in functions, numpy's functions, TensorStore's driver.

    A ``LocalPath`` reads and writes files, too. So it is imported for annotations alone.
    """
    tree = ast.parse(source)
    for_annotations = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for each in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in FILE_MODULES]
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in FILE_MODULES:
                found.append(module)
            case ast.ImportFrom(module=str(module), names=names):
                of_numpy = NUMPY_FILES | ONLY_OF_NUMPY if module.split(".")[0] in ("jax", "numpy") else frozenset()
                found += [name.name for name in names if name.name in of_numpy]
                if node not in for_annotations:
                    found += [name.name for name in names if name.name == "LocalPath"]
            case ast.Attribute(attr=attr) if attr in NUMPY_FILES or attr == "LocalPath":
                found.append(attr)
            case ast.Attribute(value=ast.Name(id="np" | "jnp" | "numpy"), attr=attr) if attr in ONLY_OF_NUMPY:
                found.append(attr)
            case ast.Name(id="open" | "__import__" as name):
                found.append(name)
            case ast.Call(keywords=keywords) if any(
                word.arg == "driver" and getattr(word.value, "value", "") == "file" for word in keywords
            ):
                found.append("TensorStore's driver 'file'")
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                if any(getattr(k, "value", "") == "driver" and getattr(v, "value", "") == "file" for k, v in pairs):
                    found.append("TensorStore's driver 'file'")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_outside_of_storage_does_file_io(module: Path) -> None:
    assert file_access_in((PACKAGE / module).read_text()) == EXCEPTIONS.get(module, [])


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import os.path as p",
        "def f():\n    from pathlib import Path",
        "from shutil import rmtree",
        "open('file')",
        "{'driver': 'file'}",
        "dict(driver='file')",
        "spec.update(base=1, driver='file')",
        "read = open",
        "__import__('os')",
        "import importlib\nimportlib.import_module('os')",
        "from importlib import import_module",
        "np.memmap('file')",
        "np.fromfile('file')",
        "np.load('file')",
        "from numpy import load",
        "from numpy.lib.format import open_memmap",
        "array.tofile('file')",
        "from gracepoint.machine import LocalPath",
        "from gracepoint.checkpoint.storage.storage_path import LocalPath as P, UserPath",
        "machine.LocalPath('/').write_bytes(b'')",
    ],
)
def test_file_io_is_found(source: str) -> None:
    assert file_access_in(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING:\n    from gracepoint.machine import LocalPath\ndef f(path: LocalPath) -> None: pass",
        "json.load(stream)",
        "path.open()",
        "{'driver': 'ocdbt'}",
        "from jax import numpy",
    ],
)
def test_what_reaches_no_file_is_not_found(source: str) -> None:
    assert file_access_in(source) == []


def test_all_modules_are_looked_at() -> None:
    assert Path("steps/commit.py") in MODULES
    assert len(MODULES) > 40
