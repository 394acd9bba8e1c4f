"""The commands that the pages show, as words."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md", "charts/gracepoint/*.md", "*/README.md")
    for page in ROOT.glob(pattern)
)
#: What a shell has before a command that it runs.
_BEFORE = {"do", "then", "if", "while", "!", "time"}
_REDIRECTIONS = {">", ">>", "2>", "<"}


def blocks(text: str) -> Iterator[str]:
    """The lines of blocks of commands: indented ones, and fenced ones that are no other language."""
    fence: str | None = None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.startswith("```"):
            fence = None if fence is not None else line.strip("`").strip()
        elif fence in ("", "sh", "bash", "console") or (fence is None and line.startswith("    ")):
            yield line.strip().removeprefix("$ ")


def spans(text: str) -> Iterator[str]:
    """Code within a sentence or a table."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for span in re.findall(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", prose):
        yield " ".join(span.replace("\\|", "|").split())


def simple(line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without assignments before it. Nothing if it is no command of a shell."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
    reader.whitespace_split = True
    words: list[str] = []
    with contextlib.suppress(ValueError):  # an apostrophe: no command
        for word in [*reader, ";"]:
            if set(word) <= set("|&;()"):
                if words:
                    yield list(itertools.takewhile(lambda word: word not in _REDIRECTIONS, words))
                words = []
            elif words or not (re.match(r"\w+=", word) or word in _BEFORE | _REDIRECTIONS):
                words.append(word.strip("[]"))


def commands(*programs: str) -> Iterator[tuple[Path, list[str], bool]]:
    """The page and the words of each command with one of these programs, and whether it stands for itself."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for whole, lines in ((True, blocks(text)), (False, spans(text))):
            shown = (line for line in lines if any(program in line for program in programs))
            for words in (words for line in shown for words in simple(line) if words[0] in programs):
                yield page, words, whole


def cases(found: Iterable[tuple[Path, list[str], bool]]) -> list[Any]:
    """Parameters of a test, each command of a page once."""
    once = {(page.name, *words): (words, whole) for page, words, whole in found}
    return [pytest.param(*values, id=f"{page}: {' '.join(words)}") for (page, *words), values in once.items()]
