"""The command line: ``kubectl gracepoint``, or ``gracepoint``.

``app`` puts the commands together. ``status``, ``goodput``, ``drill``, ``doctor``, ``signals`` and ``checkpoints`` are
a command each, as are ``lint_command`` and ``timeline_command``, whose computations are in ``lint`` and ``timeline``. A
command reads what it needs, and prints the answer; what it computes is in pure functions. ``cluster`` reads and writes
the API server through the operator's client, and finds a workload by the name that a user gives. It knows the kinds of
the operator's registry.

``ExitCode`` and the errors below are those of all commands. They load nothing: the console scripts are installed even
without the extra ``cli``.

Nothing else imports this package. The library does not need it, so a training image does not contain it.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. A wrong argument ends with 2, as in other command lines; an interrupted command with 130."""

    OK = 0
    BAD = 1  # the answer is known, and it is bad: a drill that did not commit, a damaged checkpoint, an error in a file
    USAGE = 2
    UNKNOWN = 3  # the answer is not known: no cluster, no such object, no right, no library
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot give an answer.

    Args:
        message: What was found, and what was expected.
        todo: What the user can do. Empty if the message says it.
        code: The exit code.
    """

    def __init__(self, message: str, todo: str = "", code: ExitCode = ExitCode.UNKNOWN) -> None:
        super().__init__(message)
        self.todo = todo
        self.code = code


class NotAllowed(CommandError):
    """The user may not read or write what a command needs."""
