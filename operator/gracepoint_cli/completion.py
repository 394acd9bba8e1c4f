"""Completes the arguments of ``kubectl gracepoint``: kubectl runs ``kubectl_complete-gracepoint`` with them.

The last argument is the one to complete. The answer is one completion a line, and a line with flags for the shell.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence

#: Files are not completed, as in Cobra's ShellCompDirectiveNoFileComp.
_NO_FILES = ":4"
_NAME = "gracepoint"


def main() -> None:
    """Prints the completions that may stand in the place of the last argument."""
    arguments = sys.argv[1:]
    for word in words(arguments[:-1], arguments[-1] if arguments else ""):
        print(word)
    print(_NO_FILES)


def words(before: Sequence[str], incomplete: str) -> list[str]:
    """Returns the arguments that may follow ``before`` and begin with ``incomplete``.

    It asks the command line in the way in which bash does, so that both answer the same.
    """
    from gracepoint_cli.app import app

    os.environ |= {
        f"_{_NAME.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join([_NAME, *before, incomplete]),
        "COMP_CWORD": str(len(before) + 1),
    }
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        app(args=[], prog_name=_NAME)
    return [word for word in answer.getvalue().splitlines() if word.startswith(incomplete)]
