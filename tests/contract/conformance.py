"""What Orbax, JAX and Megatron do, and which tests hold each of it here: ``conformance/*.toml`` has the rows.

``guarantees.toml`` has what Gracepoint promises beyond them of several processes.

``python -m tests.contract.conformance`` writes them as tables to build/conformance. A row of a ``behaviour`` says what
is the ``same``, or what the reference (``theirs``) and Gracepoint (``here``) do, and ``why`` they differ. A row of a
``name`` says what became of public ``names`` of Orbax: ``is`` is one of ``STATUSES``.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "conformance"
WRITTEN = ROOT / "build" / "conformance"
NAMES = "orbax-names"
#: The references of which behaviours are listed.
REFERENCES = tuple(path.stem for path in sorted(DATA.glob("*.toml")) if path.stem != NAMES)
STATUSES = ("same", "other name", "different", "not there")


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What a reference does, and what is done here."""

    part: str
    same: str = ""
    theirs: str = ""
    here: str = ""
    why: str = ""
    tests: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        what = self.same or f"{self.theirs}. Here: {self.here}. Why: {self.why}"
        return what, "same" if self.same else "different", _code(self.tests)


@dataclasses.dataclass(frozen=True)
class Name:
    """Public names of Orbax, in a class or module (``part``, or "" for the package), and what became of them."""

    part: str
    names: tuple[str, ...]
    status: str
    here: str = ""
    tests: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        return _code(self.names), self.status, self.here, _code(self.tests)


def behaviours(reference: str) -> list[Behaviour]:
    found = tomllib.loads(source(reference))["behaviour"]
    return [Behaviour(**(row | {"tests": tuple(row.get("tests", ()))})) for row in found]


def names() -> list[Name]:
    found = tomllib.loads(source(NAMES))["name"]
    return [
        Name(row["part"], tuple(row["names"]), row["is"], row.get("here", ""), tuple(row.get("tests", ())))
        for row in found
    ]


def rows(table: str) -> Sequence[Behaviour | Name]:
    return names() if table == NAMES else behaviours(table)


@cache
def source(table: str) -> str:
    return (DATA / f"{table}.toml").read_text(encoding="utf-8")


def page(table: str) -> str:
    """Returns a table as a page."""
    header = ("name", "is", "here", "tests") if table == NAMES else ("behaviour", "is", "tests")
    about = tomllib.loads(source(table))
    lines = [f"# {about['title']}", "", f"`{about['theirs']}`, and what of it `{about['ours']}` has."]
    part = None
    for row in rows(table):
        if row.part != part:
            part = row.part
            lines += ["", f"## {part or about['theirs']}", "", _row(header), _row(("--",) * len(header))]
        lines.append(_row(row.cells()))
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


@cache
def defined_tests() -> frozenset[str]:
    """Returns the names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text()))


if __name__ == "__main__":
    WRITTEN.mkdir(parents=True, exist_ok=True)
    for table in (*REFERENCES, NAMES):
        (WRITTEN / f"{table}.md").write_text(page(table), encoding="utf-8")
    for reference in REFERENCES:
        same = sum(bool(row.same) for row in behaviours(reference))
        print(f"{reference}: {same} the same, {len(behaviours(reference)) - same} different")
    print(f"written to {WRITTEN.relative_to(ROOT)}")
