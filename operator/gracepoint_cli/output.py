"""How commands print: tables for people, JSON or YAML for programs. Answers go to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gracepoint.wire.messages import one_line, printable

#: Width where the output is no terminal. Lines are not cut there.
_PLAIN_WIDTH = 400
#: Characters between two columns.
_GAP = 3
#: Characters that the last column gets at least, if it has as many.
_LAST_COLUMN = 24
#: Colours of values that tables contain.
_STYLES = {
    "ok": "green",
    "yes": "green",
    "True": "green",
    "Committed": "green",
    "Evacuated": "green",
    "Promoted": "yellow",
    "warning": "yellow",
    "unknown": "yellow",
    "Unknown": "yellow",
    "Expired": "red",
    "no": "red",
    "False": "red",
    "Failed": "red",
    "error": "red",
    "FAILED": "red",
}


class OutputFormat(StrEnum):
    """Forms of an answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """True if the answer is for programs."""
        return self in (OutputFormat.JSON, OutputFormat.YAML)


def console(*, stderr: bool = False) -> Console:
    """Returns a console on the stream as it is now."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _PLAIN_WIDTH)


def say(message: str) -> None:
    """Prints a message for the user on stderr. If it has several lines, all but the first are indented."""
    console(stderr=True).print(escape(printable(message).replace("\n", "\n  ")), soft_wrap=True)


def put_data(output: OutputFormat, value: Any) -> None:
    """Prints an answer as JSON or YAML."""
    text = json.dumps(value, indent=2, default=str)
    if output is OutputFormat.YAML:
        import yaml

        # By way of JSON: the same names and values, and no tags of Python's.
        text = yaml.safe_dump(json.loads(text), sort_keys=False).rstrip("\n")
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()  # a pipe gets it now: a command that watches continues


def put_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows as kubectl does: no lines, headings in capitals. The last column may wrap.

    On a terminal that is too narrow for the other columns, each row is printed as lines with a heading and a value.
    """
    out = console()
    if out.is_terminal and rows and _narrowest(columns, rows) > out.width:
        _put_records(columns, rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index < len(columns) - 1, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))
    sys.stdout.flush()


def _narrowest(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """Returns how many characters a line needs at least, so that only the last column wraps."""
    widths = [max(cell_len(_cell(value).plain) for value in column) for column in zip(columns, *rows, strict=True)]
    return sum(widths[:-1]) + _GAP * (len(widths) - 1) + min(widths[-1], _LAST_COLUMN)


def _put_records(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    out = console()
    heading = max(map(len, columns))
    for number, row in enumerate(rows):
        if number:
            out.print()
        for name, value in zip(columns, row, strict=True):
            # No line is broken, so that a name can be copied whole.
            out.print(Text.assemble((f"{name:{heading}}{'':{_GAP}}", "bold"), _cell(value)), soft_wrap=True)


def put(line: str = "", style: str = "") -> None:
    """Prints a line of an answer."""
    console().print(Text(one_line(line), style=style), soft_wrap=True)


@contextlib.contextmanager
def progress(activity: str) -> Iterator[None]:
    """Shows ``activity`` next to a spinner on a terminal while the block runs. Prints nothing elsewhere."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield
        return
    with err.status(escape(activity)):
        yield


def _cell(value: object) -> Text:
    text = "" if value is None else one_line(str(value))
    return Text(text, style=_STYLES.get(text, ""))
