"""Sets the clocks of the trainers' machines wrong, for the trainers alone.

All nodes of the replay's own cluster have the clock of one machine, and Linux has no namespace for it. So ``clock.c``
is preloaded into the trainers: it adds an offset to the time of day that they are told, another one for each process of
a job and its children. Kubelets, the operator and snapshot servers have the right time, and so does what the trainers
record for the replay (``trainer.py``).

Processes: a C compiler, to its end. Threads: none.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

from demo.snapshot import PROCESSES
from tests.replay import trainer
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import run

_SOURCE = Path(__file__).with_name("clock.c")
_LIBRARY, _CLOCKS = "clock.so", "clocks"
_COMPILERS = ("gcc", "cc")
#: Nanoseconds, as ``clock.c`` reads them.
_OFFSET = struct.Struct("=q")


@functools.cache
def why_not() -> str | None:
    """Returns why no clock can be set wrong on this machine. None: it can."""
    if _compiler() is None:
        return f"no C compiler was found ({' or '.join(_COMPILERS)})"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _build(Path(folder) / _LIBRARY)
        except ClusterError as error:  # such as a compiler without the C library's headers
            return f"what sets them cannot be compiled: {error}"
    return None


def _compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def _build(library: Path) -> None:
    run([str(_compiler()), "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, _SOURCE, "-ldl"])


def prepare(folder: Path, seen_at: str) -> dict[str, str]:
    """Builds the library, and makes a clock for each process of a job, which is right.

    Args:
        folder: Where, a folder that trainers can read.
        seen_at: Where they see it.

    Returns:
        The variables that trainers need. Empty if no clock can be set wrong (``why_not``).
    """
    if why_not() is not None:
        return {}
    fresh = folder / f".{_LIBRARY}"
    _build(fresh)
    fresh.replace(folder / _LIBRARY)  # processes may have mapped the one of before
    (folder / _CLOCKS).mkdir(exist_ok=True)
    for process in range(PROCESSES):
        path = folder / _CLOCKS / str(process)
        if not path.exists():
            path.write_bytes(bytes(_OFFSET.size))
        set_ahead(folder, process, 0.0)
    return {
        "LD_PRELOAD": f"{seen_at}/{_LIBRARY}",
        "REPLAY_CLOCKS": f"{seen_at}/{_CLOCKS}",
        trainer.TAI_AHEAD: str(round(time.clock_gettime(time.CLOCK_TAI) - time.time())),
    }


def set_ahead(folder: Path, process: int, seconds: float) -> None:
    """Lets the clock of a process jump.

    Args:
        folder: As for ``prepare``.
        process: Its number in the job.
        seconds: By which the clock is ahead of the right time from now on. Negative: behind.

    Raises:
        FileNotFoundError: Nothing was prepared.
    """
    file = os.open(folder / _CLOCKS / str(process), os.O_RDWR)  # never a new one: processes have mapped this one
    try:
        os.pwrite(file, _OFFSET.pack(round(seconds * 1e9)), 0)
    finally:
        os.close(file)


def is_followed(pid: int, process: int) -> bool:
    """Returns whether a process of this machine goes by the clock of a process of a job."""
    return f"/{_CLOCKS}/{process}\n" in Path(f"/proc/{pid}/maps").read_text()
