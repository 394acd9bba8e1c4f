"""Only ``checkpoint/storage/`` does file I/O, so that other stores can stand beside files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gracepoint.checkpoint

PACKAGE = Path(next(iter(gracepoint.checkpoint.__path__)))
FILE_MODULES = frozenset({"fcntl", "glob", "io", "mmap", "os", "pathlib", "shutil", "tempfile"})
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if PACKAGE / "storage" not in path.parents)


def file_access_in(source: str) -> list[str]:
    """Returns where ``source`` reaches files: imports, the built-in ``open``, TensorStore's driver."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in FILE_MODULES]
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in FILE_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id="open")):
                found.append("open()")
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                if any(getattr(k, "value", "") == "driver" and getattr(v, "value", "") == "file" for k, v in pairs):
                    found.append("TensorStore's driver 'file'")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_outside_of_storage_does_file_io(module: Path) -> None:
    assert file_access_in((PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import os.path as p",
        "def f():\n    from pathlib import Path",
        "from shutil import rmtree",
        "open('file')",
        "{'driver': 'file'}",
    ],
)
def test_file_io_is_found(source: str) -> None:
    assert file_access_in(source) != []


def test_all_modules_are_looked_at() -> None:
    assert Path("steps/commit.py") in MODULES
    assert len(MODULES) > 40
