"""``python -m gracepoint_cli``, and the console scripts ``gracepoint``, ``kubectl-gracepoint`` and
``kubectl_complete-gracepoint``.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gracepoint_cli import ExitCode

_PLUGIN = "kubectl-"
#: Files are not completed, as in Cobra's ShellCompDirectiveNoFileComp.
_NO_FILES = ":4"
_NAME = "gracepoint"


def main() -> None:
    """Runs the command line, named as the user called it."""
    try:
        from gracepoint_cli.app import run
    except ModuleNotFoundError as error:
        # The console scripts are installed even without the extra "cli".
        sys.stderr.write(f"{error}: the command line needs what the extra gracepoint[cli] installs\n")
        sys.exit(ExitCode.UNKNOWN)
    called = Path(sys.argv[0]).name
    run("kubectl gracepoint" if called.startswith(_PLUGIN) else "gracepoint", sys.argv[1:])


def complete() -> None:
    """Prints the completions that may stand in the place of the last argument.

    kubectl runs it as ``kubectl_complete-gracepoint`` with the arguments of ``kubectl gracepoint``, and expects one
    completion a line, and a line with flags for the shell.
    """
    arguments = sys.argv[1:]
    for completion in completions(arguments[:-1], arguments[-1] if arguments else ""):
        print(completion)
    print(_NO_FILES)


def completions(before: Sequence[str], incomplete: str) -> list[str]:
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
    return [line for line in answer.getvalue().splitlines() if line.startswith(incomplete)]


if __name__ == "__main__":
    main()
