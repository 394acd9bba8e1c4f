"""Rules of the tests themselves: where they stand, and what they import."""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
#: Packages of the product, by the folder of their unit tests.
PACKAGES = {
    "async_calls": "sidecar/gracepoint/async_calls",
    "checkpoint": "sidecar/gracepoint/checkpoint",
    "cli": "operator/gracepoint_cli",
    "multihost": "sidecar/gracepoint/multihost",
    "operator": "operator/gracepoint_operator",
    "preemption": "sidecar/gracepoint/preemption",
    "receivers": "sidecar/gracepoint/receivers",
    "session": "sidecar/gracepoint/session",
    "snapshots": "sidecar/gracepoint/snapshots",
    "wire": "sidecar/gracepoint/wire",
}


@functools.cache
def modules() -> dict[Path, frozenset[str]]:
    """What each module of the tests may import: dotted names, by the module's path from the root of the repository.

    The syntax trees are let go: together they are a million objects to search.
    """
    return {path.relative_to(ROOT): _imported(path) for path in sorted(TESTS.rglob("*.py"))}


def _imported(path: Path) -> frozenset[str]:
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            imported |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return frozenset(imported)


def test_no_module_imports_a_test_module() -> None:
    of_tests = {".".join(path.with_suffix("").parts) for path in modules() if path.name.startswith("test_")}
    found = {f"{path}: {name}" for path, imported in modules().items() for name in imported & of_tests}
    assert not found, "move what several tests need into a module of their folder that is no test module"


def test_imports_are_absolute() -> None:
    relative = {f"{path}: {name}" for path, imported in modules().items() for name in imported if name[:1] == "."}
    assert not relative


@pytest.mark.parametrize("folder", PACKAGES)
def test_unit_tests_stand_in_the_folders_of_their_modules(folder: str) -> None:
    package, tests = ROOT / PACKAGES[folder], TESTS / "unit" / folder
    assert package.is_dir()
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py") if path.parent.name != "fakes"}
    assert not {str(folder_of) for folder_of in folders if not (package / folder_of).is_dir()}, (
        f"no such package in {PACKAGES[folder]}"
    )


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_test_named_for_a_module_stands_in_its_folder(folder: str) -> None:
    package, tests = ROOT / PACKAGES[folder], TESTS / "unit" / folder
    files = sorted(package.rglob("*.py"))
    # Of a name that several modules and packages have, nobody can tell which of them is meant.
    names = collections.Counter(path.parent.name if path.name == "__init__.py" else path.stem for path in files)
    folders = {path.stem: path.parent.relative_to(package) for path in files if names[path.stem] == 1}
    wrong = {
        f"{path.relative_to(ROOT)}: the module is in {PACKAGES[folder] / folders[module]}"
        for path in tests.rglob("test_*.py")
        if (module := path.stem.removeprefix("test_")) in folders and path.parent.relative_to(tests) != folders[module]
    }
    assert not wrong


def test_what_unit_tests_share_stands_in_folders_named_fakes() -> None:
    unit = [path for path in modules() if path.is_relative_to("tests/unit") and path.parent.name != "fakes"]
    of_pytest = ("test_*.py", "conftest.py", "__init__.py")
    outside = {str(path) for path in unit if not any(path.match(pattern) for pattern in of_pytest)}
    assert not outside


def test_a_unit_test_that_starts_a_process_without_its_marker_fails() -> None:
    with pytest.raises(AssertionError, match=r"starts a process, so it needs the marker integration: \['true'\]"):
        subprocess.run(["true"], check=True)


@pytest.mark.integration
def test_a_test_with_the_marker_starts_processes() -> None:
    subprocess.run(["true"], check=True, timeout=60)


def test_no_module_draws_from_the_common_random_generator() -> None:
    texts = {path: path.read_text() for top in ("sidecar", "operator") for path in sorted((ROOT / top).rglob("*.py"))}
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in texts.items()
        if "random." in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "random" and node.attr != "Random"
    }
    assert not found, "a generator of its own: threads that draw from the common one change what a seeded program draws"
