"""What this process asks the kernel about its threads: to run only on idle cores, and how much time they got.

Nothing here has threads or state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_when_idle() -> None:
    """Makes the calling thread, and threads that it starts, ``SCHED_IDLE``. There is no way back without a privilege.

    Raises:
        OSError: The system does not allow it.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def cpu_time(threads: Iterable[int]) -> tuple[float, bool]:
    """Returns the processor seconds that the threads have used, and whether any of them runs or is ready to run.

    A thread that cannot be looked at counts as ready: it might be starved.

    Args:
        threads: The numbers that the kernel gives them.
    """
    ticks, ready = 0, False
    for thread in threads:
        try:
            # The name of a thread, in parentheses, may have spaces.
            fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            ready = True
            continue
        ready = ready or fields[0] == "R"
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S, ready
