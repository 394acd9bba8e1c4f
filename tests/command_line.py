"""Runs the command line in this process, as a console script does."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from gracepoint_cli.app import run


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    """Takes what is printed as a terminal does."""

    def isatty(self) -> bool:
        return True


def command(*arguments: object, columns: int | None = None) -> Done:
    """Runs ``gracepoint`` with these arguments, and returns its exit code and what it printed.

    Args:
        arguments: The arguments.
        columns: Width of the terminal, which has no colours; None: the output is no terminal.
    """
    out, err = (io.StringIO(), io.StringIO()) if columns is None else (Terminal(), Terminal())
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _variables(columns):
        try:
            run("gracepoint", [str(item) for item in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _variables(columns: int | None) -> Iterator[None]:
    """Sets the variables of the terminal."""
    wanted = {} if columns is None else {"COLUMNS": str(columns), "LINES": "40", "TERM": "dumb"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
