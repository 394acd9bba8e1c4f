"""``python -m tests.shape``: the shape of the product's code, in numbers. It judges nothing.

Counted are the library, the operator and the command line, without their tests.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIDES = {
    "library": ROOT / "sidecar/gracepoint",
    "operator": ROOT / "operator/gracepoint_operator",
    "command line": ROOT / "operator/gracepoint_cli",
}
#: Parameters, besides ``self``, from which on a constructor is counted.
MANY_PARAMETERS = 8
#: Names of values that say neither what the value is nor what it is for.
BARE_NAMES = frozenset({
    "asked", "begun", "done", "ended", "found", "given", "got", "known", "last", "left", "made", "mine",
    "ours", "said", "seen", "sent", "taken", "their", "theirs", "told", "wanted", "what", "who", "why",
})  # fmt: skip
#: Documented names of the standard library.
PUBLIC_WITH_UNDERSCORE = frozenset({"_exit", "_fields", "_field_defaults", "_replace", "_asdict"})


def _modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py"))


def _names_that_occur_twice() -> list[str]:
    stems = [path.stem for folder in SIDES.values() for path in _modules(folder) if not path.stem.startswith("__")]
    return sorted(name for name, count in collections.Counter(stems).items() if count > 1)


def _functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for folder in SIDES.values():
        for path in _modules(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield path, node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _long_constructors() -> list[str]:
    return sorted(
        f"{path.relative_to(ROOT)}:{function.lineno}"
        for path, function in _functions()
        if function.name == "__init__" and len(_parameters(function)) - 1 >= MANY_PARAMETERS
    )


def _bare_names() -> int:
    count = 0
    for _, function in _functions():
        stored = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        count += len({*stored, *_parameters(function)} & BARE_NAMES)
    return count


def _private_accesses(folder: Path) -> int:
    """Returns how often tests read or patch a private attribute of something else than ``self`` and ``super()``.

    ``os._exit`` and the methods of named tuples are public, in spite of their names.
    """
    count = 0
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                owner = node.value.func if isinstance(node.value, ast.Call) else node.value
                count += not (isinstance(owner, ast.Name) and owner.id in {"self", "cls", "super"})
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                name = next(iter(node.args[1 if len(node.args) > 2 else 0 :]), None)
                count += isinstance(name, ast.Constant) and _is_private(str(name.value).rpartition(".")[2])
    return count


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_WITH_UNDERSCORE


def _print_size(what: str, modules: int, lines: int) -> None:
    print(f"{what}: {modules} modules, {lines} lines, {1000 * modules / lines:.1f} modules per 1,000 lines")


def main() -> None:
    modules = lines = 0
    for side, folder in SIDES.items():
        here = _modules(folder)
        lines_here = sum(len(path.read_text().splitlines()) for path in here)
        _print_size(side, len(here), lines_here)
        modules, lines = modules + len(here), lines + lines_here
    _print_size("together", modules, lines)
    twice, long = _names_that_occur_twice(), _long_constructors()
    print(f"module names that occur twice: {len(twice)}: {', '.join(twice)}")
    print(f"constructors with {MANY_PARAMETERS} parameters and more: {len(long)}")
    for place in long:
        print(f"  {place}")
    print(f"parameters and variables with bare names: {_bare_names()}")
    print(f"private attributes in tests/unit: {_private_accesses(ROOT / 'tests/unit')}")


if __name__ == "__main__":
    main()
