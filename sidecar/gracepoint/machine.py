"""What this process learns from the operating system: ids, cores, memory, and the processor time of its threads.

Linux has all of it. macOS, for work on a laptop, has less, and each function says what it returns then.
Nothing here has threads or state.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

#: A path of the local file system, as users give and get it.
LocalPath = Path

# Fields of proc(5)'s stat after the name: the state, user and system time, and the start, which is field 22.
_STATE, _USER, _SYSTEM, _STARTED = 0, 11, 12, 19
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def host_name() -> str:
    """Returns the name of the machine; in a pod, the pod's."""
    return os.uname().nodename


def flush_streams() -> None:
    """Writes out what the standard streams still hold, as ``os._exit`` does not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or none
            stream.flush()


def process_id() -> int:
    """Returns the number of this process in its namespace."""
    return os.getpid()


def process_identity(pid: int) -> str:
    """Returns namespace, number and start of a process; other text where there is no process of that number."""
    if sys.platform != "linux":
        return f"0:{pid}:{_started_as_ps_says(pid) or 'gone'}"
    namespace = os.stat("/proc/self/ns/pid").st_ino
    try:
        started = _stat(Path(f"/proc/{pid}/stat"))[_STARTED]
    except OSError:
        started = "gone"
    return f"{namespace}:{pid}:{started}"


def _started_as_ps_says(pid: int) -> str:
    try:
        result = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "-".join(result.stdout.replace(":", "-").split())


def process_age_s(root: Path = Path("/")) -> float | None:
    """Returns for how many seconds this process has run. None if the system does not say.

    Args:
        root: The folder that has ``proc``.
    """
    if sys.platform != "linux":
        return None
    try:
        ticks = int(_stat(root / "proc/self/stat")[_STARTED])  # since the system was booted
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return age_s if ticks > 0 and age_s >= 0 else None  # sandboxes that emulate Linux may say 0


def leave_process_group(*_: object) -> None:
    """Moves this process into a separate process group, so that a signal to its parent's group does not end it.

    For processes on which training depends, such as the workers of a data loader, as the first thing that they do. Some
    init programs and launchers send SIGTERM to the whole group, and then training breaks off before it has saved.
    ``Process.terminate()`` and other signals to the process itself still reach it.

        DataLoader(..., worker_init_fn=gracepoint.leave_process_group)
        multiprocessing.Pool(initializer=gracepoint.leave_process_group)

    Args:
        *_: What such a library passes, for example the worker's number. Not used.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def run_when_idle() -> None:
    """Makes the calling thread, and threads that it starts, ``SCHED_IDLE``. There is no way back without a privilege.

    Raises:
        OSError: The system does not allow it, or has no such priority.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "the system has no priority for what may run only when nothing else does")
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def be_nice(niceness: int) -> None:
    """Sets the niceness of the calling thread. Does nothing where threads have none of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def cpu_time(threads: Iterable[int]) -> tuple[float, bool]:
    """Returns the processor seconds that the threads have used, and whether any of them runs or is ready to run.

    A thread that cannot be looked at counts as ready: it might be starved.

    Args:
        threads: The numbers that the kernel gives them.
    """
    ticks, ready = 0, False
    for thread in threads:
        try:
            fields = _stat(Path(f"/proc/self/task/{thread}/stat"))
        except OSError:
            ready = True
            continue
        ready = ready or fields[_STATE] == "R"
        ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / _TICKS_PER_S, ready


def available_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process can use at once.

    They are the cores that it may run on, or fewer if the CPU limit of a container is less. A limit of 1.5 counts as 2.

    Args:
        root: The folder that has ``proc`` and ``sys/fs/cgroup``.
    """
    if sys.platform != "linux":
        return all_cores()
    limits = (_core_limit(group) for group in _groups(root, "cpu"))
    return min([len(os.sched_getaffinity(0)), *(limit for limit in limits if limit is not None)])


def all_cores() -> int:
    """Returns how many cores the machine has."""
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Returns how much memory of the machine is free. Where the system does not say, half of what it has."""
    if sys.platform != "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def environment() -> Mapping[str, str]:
    """Returns the environment variables."""
    return os.environ


def left_by_pool(root: Path = Path("/")) -> dict[str, int]:
    """Returns how many bytes are left in each pool that this process takes memory from, by the pool's name.

    The pools are the machine, and each control group of this process that has a limit. The name of a pool is the same
    in all processes that share it. Empty if the system does not say.

    Args:
        root: The folder that has ``proc`` and ``sys/fs/cgroup``.
    """
    machine = _machine_name(root)
    free = {machine: _of_machine_name(root / "proc/meminfo")}
    for group in _groups(root, "memory"):
        if (left_bytes := _of_group(group)) is not None:
            free[f"{machine}/{group.stat().st_ino}"] = left_bytes  # the inode, as paths differ between containers
    return {pool: left_bytes for pool, left_bytes in free.items() if left_bytes is not None}


def _machine_name(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "machine"


def _groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control groups, in version 2 or 1 of their file system.

    Args:
        root: The folder that has ``proc`` and ``sys/fs/cgroup``.
        controller: What the groups limit: ``cpu`` or ``memory``. In version 1, each controller has separate groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            own = mount / path.strip("/")
            # In a container, its own group is often the root of what it sees, whatever path ``proc`` has.
            folders += [mount, *(group for group in (own, *own.parents) if mount in group.parents)]
    return folders


def _of_group(group: Path) -> int | None:
    limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    cached = _fields(group / "memory.stat")
    return max(0, limit - used + cached.get("inactive_file", 0) + cached.get("active_file", 0))


def _core_limit(group: Path) -> int | None:
    try:  # version 2 has both numbers in one file
        quota_us, period_us = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):  # not there, or "max"
        quota_us, period_us = _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0
    return math.ceil(quota_us / period_us) if quota_us > 0 and period_us > 0 else None


def _of_machine_name(meminfo: Path) -> int | None:
    available_kib = _fields(meminfo).get("MemAvailable:")
    return None if available_kib is None else available_kib * 1024


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # not there, or "max"


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {name: int(value) for name, value, *_ in (w for w in rows if len(w) > 1) if value.isdigit()}


def _stat(path: Path) -> list[str]:
    """Returns the fields after the name of a process or thread, which is in parentheses and may hold anything."""
    return path.read_text().rpartition(")")[2].split()
