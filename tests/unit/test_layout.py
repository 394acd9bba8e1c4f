"""Rules of the tests themselves: where they stand, what they import, and how they are named."""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
#: A longer name describes the cause as well, which belongs into the id of a parameter or into the docstring.
WORDS_LIMIT = 12
#: Of the modules of a room, without those of the rooms inside it.
ROOM_SIZES = range(3, 13)
#: Packages of the product, by the folder of their unit tests.
PACKAGES = {
    "async_calls": "sidecar/gracepoint/async_calls",
    "checkpoint": "sidecar/gracepoint/checkpoint",
    "cli": "operator/gracepoint_cli",
    "compile_cache": "sidecar/gracepoint/compile_cache",
    "multihost": "sidecar/gracepoint/multihost",
    "operator": "operator/gracepoint_operator",
    "preemption": "sidecar/gracepoint/preemption",
    "receivers": "sidecar/gracepoint/receivers",
    "session": "sidecar/gracepoint/session",
    "wire": "sidecar/gracepoint/wire",
}


class Facts(NamedTuple):
    """What the rules ask of a module. Its syntax tree is let go: together they are a million objects to search."""

    #: Dotted names of all modules that may be imported, and of what is imported from them.
    imported: frozenset[str]
    #: Names of all functions, nested ones too.
    functions: tuple[str, ...]


@functools.cache
def modules() -> dict[Path, Facts]:
    """What the rules ask of each module of the tests, by its path from the root of the repository."""
    return {path.relative_to(ROOT): _facts(path) for path in sorted(TESTS.rglob("*.py"))}


def _facts(path: Path) -> Facts:
    imported, functions = set[str](), list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            imported |= {f"{module}.{alias.name}" for alias in node.names} | {module}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node.name)
    return Facts(frozenset(imported), tuple(functions))


def test_no_module_imports_a_test_module() -> None:
    of_tests = {".".join(path.with_suffix("").parts) for path in modules() if path.name.startswith("test_")}
    found = {f"{path}: {name}" for path, facts in modules().items() for name in facts.imported & of_tests}
    assert not found, "move what several tests need into a module of their folder that is no test module"


def test_imports_are_absolute() -> None:
    relative = {f"{path}: {name}" for path, facts in modules().items() for name in facts.imported if name[:1] == "."}
    assert not relative


def test_names_are_short() -> None:
    long = {
        f"{path}: {name}"
        for path, facts in modules().items()
        for name in facts.functions
        if name.startswith("test_") and len(name.split("_")) - 1 > WORDS_LIMIT
    }
    assert not long, f"over {WORDS_LIMIT} words: name the behaviour; the cause is an id of a parameter or the docstring"


def test_rooms_have_three_to_twelve_modules() -> None:
    found = {}
    for package in ("sidecar/gracepoint", "operator/gracepoint_operator", "operator/gracepoint_cli"):
        for start in (ROOT / package).rglob("__init__.py"):
            # Not counted: ``__init__``, which says what the room is for, and ``__main__``, which only starts it.
            count = sum(not path.name.startswith("__") for path in start.parent.glob("*.py"))
            found[str(start.parent.relative_to(ROOT))] = count
    wrong = {room: count for room, count in found.items() if count not in ROOM_SIZES}
    assert not wrong, "put modules that belong together into a room of their own, or a room into the next one"


@pytest.mark.parametrize("folder", PACKAGES)
def test_unit_tests_stand_in_the_folders_of_their_modules(folder: str) -> None:
    package, tests = ROOT / PACKAGES[folder], TESTS / "unit" / folder
    assert package.is_dir()
    rooms = {path.parent.relative_to(tests) for path in tests.rglob("*.py") if path.parent.name != "fakes"}
    assert not {str(room) for room in rooms if not (package / room).is_dir()}, f"no such package in {PACKAGES[folder]}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_test_named_for_a_module_stands_in_its_folder(folder: str) -> None:
    package, tests = ROOT / PACKAGES[folder], TESTS / "unit" / folder
    files = sorted(package.rglob("*.py"))
    # Of a name that several modules and packages have, nobody can tell which of them is meant.
    names = collections.Counter(path.parent.name if path.name == "__init__.py" else path.stem for path in files)
    rooms = {path.stem: path.parent.relative_to(package) for path in files if names[path.stem] == 1}
    wrong = {
        f"{path.relative_to(ROOT)}: the module is in {PACKAGES[folder] / rooms[module]}"
        for path in tests.rglob("test_*.py")
        if (module := path.stem.removeprefix("test_")) in rooms and path.parent.relative_to(tests) != rooms[module]
    }
    assert not wrong


def test_what_unit_tests_share_stands_in_folders_named_fakes() -> None:
    unit = [path for path in modules() if path.is_relative_to("tests/unit") and path.parent.name != "fakes"]
    of_pytest = ("test_*.py", "conftest.py", "__init__.py")
    outside = {str(path) for path in unit if not any(path.match(pattern) for pattern in of_pytest)}
    assert not outside


def test_a_unit_test_that_starts_a_process_is_told_its_marker() -> None:
    with pytest.raises(AssertionError, match=r"starts a process, so it needs the marker integration: \['true'\]"):
        subprocess.run(["true"], check=True)


@pytest.mark.integration
def test_a_test_with_the_marker_starts_processes() -> None:
    subprocess.run(["true"], check=True, timeout=60)


def test_no_module_draws_from_the_common_random_generator() -> None:
    texts = {path: path.read_text() for room in ("sidecar", "operator") for path in sorted((ROOT / room).rglob("*.py"))}
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in texts.items()
        if "random." in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "random" and node.attr != "Random"
    }
    assert not found, "a generator of its own: threads that draw from the common one change what a seeded program draws"
