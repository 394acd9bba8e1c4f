"""Runs a program of Kubernetes, or of its surroundings, beside a lone API server.

Processes: the program, in a process group of its own, until ``running`` ends. Threads: none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testcluster.shell import log_tail

_KILLED_S = 10.0


@contextlib.contextmanager
def running(name: str, folder: Path, argv: Sequence[str | Path], **environment: str) -> Iterator[Path]:
    """Runs a program. Gives its log, whose end a test's failure within the block shows.

    Args:
        name: Name of the log, without its ending.
        folder: The program's home, which also has the log.
        argv: The program and its arguments.
        environment: Variables of the program beside those that each program has.
    """
    log = folder / f"{name}.log"
    usual = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "NO_PROXY": "*"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env=usual | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    except AssertionError as error:
        error.add_note(log_tail(log))
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILLED_S)
