"""Running commands and waiting, always with a limit and always with a reason when the limit is reached.

Commands run in a process group of their own, which is killed when the limit is reached or the caller is
interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.testcluster.api import ClusterError


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    timeout_s: float = 60,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, capturing what it says.

    Args:
        argv: The command.
        stdin: Its input; none by default.
        timeout_s: How long it may take.
        check: Raise if it fails.
        env: Variables to set besides the present ones.
        cwd: Where to run it.

    Raises:
        ClusterError: It failed, or took too long, or could not be started.
    """
    words = [str(word) for word in argv]
    shown = " ".join(words[:8]) + (" ..." if len(words) > 8 else "")
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise ClusterError(f"cannot run {shown}: {error}") from error
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        _kill_group(process)
        out, err = process.communicate()
        raise ClusterError(f"not done after {timeout_s:g} s: {shown}\n{_tail(err or out)}") from late
    except BaseException:
        _kill_group(process)
        process.wait()
        raise
    if check and process.returncode != 0:
        raise ClusterError(f"exit status {process.returncode}: {shown}\n{_tail(err or out)}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def wait_until(
    what: str,
    condition: Callable[[], bool],
    *,
    timeout_s: float,
    every_s: float = 0.2,
    hint: Callable[[], str] = lambda: "",
) -> None:
    """Wait for a condition.

    Args:
        what: What is waited for, for the message.
        condition: Asked again and again; a ``ClusterError`` from it counts as no.
        timeout_s: How long.
        every_s: How often.
        hint: Makes an addition to the message, such as the end of a log.

    Raises:
        ClusterError: It did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    last = ""
    while True:
        try:
            if condition():
                return
            last = ""
        except ClusterError as error:
            last = f"\nlast answer: {error}"
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s for {what}, in vain{last}{hint()}")
        time.sleep(every_s)


def say(message: str) -> None:
    """Tell the person who waits; on standard error, as standard output belongs to results."""
    print(f"testcluster: {message}", file=sys.stderr, flush=True)


def log_tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, with its name, for an error message."""
    if not path.exists():
        return f"\n(no log at {path})"
    return f"\nend of {path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-30:])
