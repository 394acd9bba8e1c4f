"""A process that claims a directory where the system refuses hard links.

lease_process.py ROOT JOB ERRNO [die]: waits for a line, claims, says how that went, and holds until stdin ends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import time
from pathlib import Path
from typing import Any

#: Numbers of link and linkat, by machine.
CALLS = {"x86_64": (86, 265), "aarch64": (37,)}

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def refuse_links(error: int) -> None:
    """Makes the kernel answer link and linkat with ``error``, in this process (seccomp(2))."""
    calls = CALLS[platform.machine()]
    program = [(_LOAD, 0, 0, 0)]  # the call's number
    program += [(_JUMP_IF_EQUAL, len(calls) - position, 0, call) for position, call in enumerate(calls)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, described, 0, 0)):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main(root: Path, job: str, error: int, *, die: bool) -> None:
    from gracepoint.checkpoint.format.layout import Layout
    from gracepoint.checkpoint.steps import lease
    from gracepoint.checkpoint.storage.locations import storage_path
    from gracepoint.deadline import Deadline
    from gracepoint.errors import CheckpointError

    refuse_links(error)
    if die:

        def replace(*_: Any) -> None:
            os._exit(9)

        os.replace = replace  # type: ignore[assignment]
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        held = lease.claim(
            Layout(storage_path(root)), job, f"{job}-0", deadline=Deadline.after(0.0, time.monotonic), sleep=time.sleep
        )
    except CheckpointError as refused:
        print(f"refused: {refused}", flush=True)
        return
    print("held", flush=True)
    sys.stdin.read()
    held.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), die="die" in sys.argv[4:])
