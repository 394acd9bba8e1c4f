"""How much memory this process can still have: the machine's, or what its container leaves it.

Linux kills a container that goes over its limit without a word, so it is asked before memory is reserved. What the
page cache holds counts as used in a container, and is given up on demand: it can be had.
"""

from __future__ import annotations

from pathlib import Path

from gracepoint.errors import CheckpointError


def check_fits(needed_bytes: int, limit_bytes: int | None, available_bytes: int | None) -> None:
    """Makes sure that a snapshot may be taken.

    Args:
        needed_bytes: Of host memory, in this process.
        limit_bytes: The setting; None: no limit.
        available_bytes: That can be had; None: not known.

    Raises:
        CheckpointError: It may not; says what to do.
    """
    for found_bytes, what in (
        (limit_bytes, "host_memory_limit_bytes allows"),
        (available_bytes, "this process can still have"),
    ):
        if found_bytes is not None and needed_bytes > found_bytes:
            raise CheckpointError(
                f"a save in the background needs {needed_bytes} bytes of host memory in this process for a snapshot of "
                f"its part of the state, and {what} {found_bytes}: give the container more memory, or raise the limit, "
                "or spread the state over more processes, or save without a copy (no periodic saves)"
            )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process can still have; None where nothing tells.

    The least of what the machine has and what each of this process's control groups has left.

    Args:
        root: Of the file system that ``proc`` and ``sys/fs/cgroup`` are looked for in.
    """
    found = [_of_machine(root / "proc/meminfo"), *(_of_group(group) for group in _groups(root))]
    return min((size_bytes for size_bytes in found if size_bytes is not None), default=None)


def _groups(root: Path) -> list[Path]:
    """Returns the folders of this process's control groups, in version 2 or 1 of their file system."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = {"": root / "sys/fs/cgroup", "memory": root / "sys/fs/cgroup/memory"}.get(controllers)
        if mount is not None:
            own = mount / path.strip("/")
            # In a container its own group is often the root of what it sees, whatever its path is called.
            found += [mount, *(group for group in (own, *own.parents) if mount in group.parents)]
    return found


def _of_group(group: Path) -> int | None:
    limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    cached = _fields(group / "memory.stat")
    return max(0, limit - used + cached.get("inactive_file", 0) + cached.get("active_file", 0))


def _of_machine(meminfo: Path) -> int | None:
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
    words = (line.split() for line in lines)
    return {name: int(value) for name, value, *_ in (w for w in words if len(w) > 1) if value.isdigit()}
