"""Runs the command line in this process, as a console script does."""

from __future__ import annotations

import contextlib
import io
import json
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


def command(*arguments: object) -> Done:
    """Runs ``gracepoint`` with these arguments, and returns its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run("gracepoint", [str(item) for item in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
