"""What another process does, as the kernel and py-spy say. There is no state here; any thread may call everything.

py-spy can read the stack of a process that is stopped or hangs in C code. It is not a dependency. It is used if it is
installed in the image, and if the kernel lets this process trace the other one (``ptrace(2)``). If it does not end in
time, it is killed, and a daemon thread ("gracepoint-py-spy") waits for its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

_PROC = Path("/proc")
_PY_SPY = "py-spy"
_PY_SPY_S = 8.0
_FRAMES = 12
_STACK_CHARACTERS = 3000
_ERROR_CHARACTERS = 300
_STATES = {
    "T": "is stopped by a signal (state T)",
    "t": "is stopped by a debugger (state t)",
    "D": "waits in the kernel and cannot be interrupted (state D{where})",
    "S": "waits in the kernel (state S{where})",
    "R": "computes, and does not let its other threads run (state R)",
    "Z": "has ended (state Z)",
    "X": "has ended (state X)",
}


@dataclasses.dataclass(frozen=True)
class ProcessAt:
    """Where a process is, for processes in other containers.

    Attributes:
        process_id: The process's PID in its own PID namespace.
        namespace: Inode number of that namespace. 0: it is not known.
        thread_id: The kernel's number of its training thread.
    """

    process_id: int
    namespace: int
    thread_id: int

    @classmethod
    def here(cls, thread_id: int) -> ProcessAt:
        """Returns where this process is, and its thread of that number."""
        return cls(os.getpid(), _namespace(), thread_id)

    @property
    def visible(self) -> bool:
        """Whether this process sees that one: both are in the same PID namespace."""
        return self.namespace != 0 and self.namespace == _namespace()


@dataclasses.dataclass(frozen=True)
class SeenProcess:
    """What was seen of a process.

    Attributes:
        does: What it does, in words. Empty if it cannot be seen.
        stack: Its stack, as lines of a traceback. Empty if it could not be read.
        why_not: Why there is no stack. Empty if there is one.
    """

    does: str
    stack: str = ""
    why_not: str = ""


def look(at: ProcessAt) -> SeenProcess:
    """Looks at a process. Takes up to ten seconds."""
    if not at.visible:
        why = "it is in another container, and the pod has no shareProcessNamespace"
        return SeenProcess("", why_not=why)
    stack, why_not = _stack(at)
    return SeenProcess(_state(at), stack, why_not)


def _state(at: ProcessAt) -> str:
    thread = _PROC / str(at.process_id) / "task" / str(at.thread_id)
    try:
        lines = (thread / "status").read_text().splitlines()
    except OSError:
        return "has ended, or its training thread has"
    letter = next((line.split()[1] for line in lines if line.startswith("State:")), "")
    where = ""
    with contextlib.suppress(OSError):  # forbidden, or not compiled in
        where = (thread / "wchan").read_text().strip("0\n")
    words = _STATES.get(letter, f"is in state {letter or 'unknown'}")
    return words.format(where=f", in {where}" if where else "")


def _stack(at: ProcessAt) -> tuple[str, str]:
    """Returns the stack of the training thread, and why there is none. One of the two is empty."""
    program = shutil.which(_PY_SPY) or shutil.which(_PY_SPY, path=str(Path(sys.executable).parent))
    if program is None:
        return "", f"{_PY_SPY} is not installed in this image"
    # Without --nonblocking, it would stop and continue the process.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(at.process_id)]
    try:
        spy = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return "", f"{_PY_SPY} failed: {error}"
    try:
        dumped, errors = spy.communicate(timeout=_PY_SPY_S)
    except subprocess.TimeoutExpired:
        spy.kill()
        # It may hang in the kernel, as the process that it looks at does. So nobody else waits for its end.
        threading.Thread(target=spy.communicate, name="gracepoint-py-spy", daemon=True).start()
        return "", f"{_PY_SPY} did not end within {_PY_SPY_S:g} s"
    if spy.returncode != 0:
        said = " ".join(errors.split())[-_ERROR_CHARACTERS:]
        return "", f"{_PY_SPY} could not read it, which takes the right to trace it (docs: troubleshooting): {said}"
    return _as_traceback(dumped, at.thread_id)


def _as_traceback(dumped: str, thread_id: int) -> tuple[str, str]:
    """Returns the frames of one thread, the innermost one last, of what py-spy prints."""
    try:
        threads = json.loads(dumped)
        frames = next(each["frames"] for each in threads if each["os_thread_id"] == thread_id)
        lines = [f'  File "{each["filename"]}", line {each["line"]}, in {each["name"]}' for each in frames[:_FRAMES]]
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        return "", f"{_PY_SPY} did not print the training thread ({error!r})"
    return "".join(f"{line}\n" for line in reversed(lines))[-_STACK_CHARACTERS:], ""


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
