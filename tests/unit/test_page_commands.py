"""Commands of the project that pages and messages tell to run exist, and take the options that are shown.

What Helm sets is checked in ``test_platform_pages``, and what kubectl takes in ``test_kubectl_in_pages``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from gracepoint_cli.app import app
from tests.page_commands import cases, commands

ROOT = Path(__file__).parents[2]
#: The parser's error for wrong arguments.
WRONG: type[Exception] = typer.BadParameter.__mro__[1]
PYTHONS = {"python", "python3", ".venv/bin/python"}
#: Names of the project's modules begin so.
OURS = ("gracepoint", "tests", "demo", "benchmarks")


def of_the_command_line() -> Iterator[tuple[Path, list[str], bool]]:
    for page, words, whole in commands("gracepoint", "kubectl"):
        if words[0] == "gracepoint" and (whole or words[-1] != "known"):  # a line of a log
            yield page, words[1:], whole
        elif words[1:2] == ["gracepoint"]:
            yield page, words[2:], whole


def parse(words: Sequence[str], *, whole: bool) -> None:
    """Parses arguments of the command line, and runs nothing.

    Args:
        words: The arguments.
        whole: Whether they are all arguments. Otherwise, positional ones may be left out.

    Raises:
        WRONG: They are wrong.
    """
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while getattr(command, "commands", None):
        if not rest or rest[0].startswith("-"):
            known = {option for param in command.params for option in param.opts}
            assert {word for word in rest if word.startswith("-")} <= known, words
            return
        assert rest[0] in command.commands, f"found {rest[0]!r}, expected one of {sorted(command.commands)}"
        command = command.commands[rest.pop(0)]
    try:
        command.make_context(command.name, rest)
    except typer.Exit:
        return  # --help
    except WRONG as error:
        if whole or type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize(("words", "whole"), cases(of_the_command_line()))
def test_pages_show_arguments_that_the_command_line_takes(words: list[str], whole: bool) -> None:
    parse(words, whole=whole)


@pytest.mark.parametrize("wrong", [["drill"], ["stat"], ["status", "--wide"], ["checkpoints", "rm", "x"]])
def test_arguments_that_the_command_line_does_not_take_are_noticed(wrong: list[str]) -> None:
    with pytest.raises((AssertionError, WRONG)):
        parse(wrong, whole=True)


def messages() -> list[Any]:
    """What the programs themselves advise."""
    found = set()
    for folder, kind in (("sidecar", "py"), ("operator", "py"), ("demo", "py"), ("charts", "txt"), ("charts", "yaml")):
        for file in (ROOT / folder).rglob(f"*.{kind}"):
            text = re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))  # literals over several lines
            for words in re.findall(r"kubectl gracepoint ((?:checkpoints )?[a-z]+)", text):
                found.add((file.name, words))
    return [pytest.param(words.split(), id=f"{file}: {words}") for file, words in sorted(found)]


@pytest.mark.parametrize("words", messages())
def test_messages_advise_commands_that_exist(words: list[str]) -> None:
    parse(words, whole=False)


def modules() -> Iterator[tuple[Path, list[str], bool]]:
    for page, words, whole in commands(*PYTHONS):
        if words[1:2] == ["-m"] and words[2].partition(".")[0] in OURS:
            yield page, words[2:], whole


def sources(module: str) -> str:
    """The code of a module, or of all modules of a package, and of what they import from beside them."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"found no module {module}"
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = set(origin.parent.glob("*.py")) if origin.name == "__init__.py" else {origin}
    for names in re.findall(r"^from benchmarks import ([\w, ]+)", origin.read_text(encoding="utf-8"), re.M):
        files |= {origin.parent / f"{name.split()[0]}.py" for name in names.split(",")}
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize(("words", "whole"), cases(modules()))
def test_pages_show_options_that_the_modules_have(words: list[str], whole: bool) -> None:
    code = sources(words[0])
    options = [word.strip("[]").partition("=")[0] for word in words[1:] if word.strip("[]").startswith("--")]
    known = {option for option in options if f'"{option}"' in code}
    # The arguments of a module without options of its own are another program's.
    assert set(options) - {"--", "--help"} <= known, sorted(set(options) - known)
    if words[0] == "tests.testcluster" and len(words) > 1:
        assert f'"{words[1]}"' in code


def scripts() -> Iterator[tuple[Path, list[str], bool]]:
    for page, words, whole in commands(*PYTHONS):
        if words[1:] and words[1].startswith("examples/"):
            yield page, words[1:], whole


@pytest.mark.parametrize(("words", "whole"), cases(scripts()))
def test_pages_show_options_that_the_examples_have(words: list[str], whole: bool) -> None:
    code = (ROOT / words[0]).read_text(encoding="utf-8")
    assert [option for option in words[1:] if option.startswith("--") and f'"{option}"' not in code] == []


@pytest.mark.parametrize(("words", "whole"), cases(commands("make")))
def test_pages_show_targets_and_variables_of_the_makefile(words: list[str], whole: bool) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        assert (f"$({name})" in makefile or f"$({name}," in makefile) if is_variable else word in targets, word
