"""Real limits of the kernel, for tests: small file systems, and memory that ends. It takes root to make them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from tests.testcluster import cgroups
from tests.testcluster.system import cgroup_roots

_TIMEOUT_S = 30.0
_PERIOD_US = 100_000  # the kernel's default
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # of control groups of version 2 and 1


def cannot_mount() -> str | None:
    """Why there can be no small file system here; None if there can."""
    if os.geteuid() != 0:
        return "it takes root to mount a file system"
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else None


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, kind: Literal["ext4", "tmpfs"] = "ext4") -> Iterator[None]:
    """Mounts a new file system on ``folder``, which it makes."""
    folder.mkdir()
    image = folder.with_name(f"{folder.name}.image")
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder))
    else:
        with image.open("wb") as file:
            os.truncate(file.fileno(), size_bytes)
        # All of it is for files: nothing is kept for root, and there is no journal.
        _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))
        image.unlink(missing_ok=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Lets nobody write below ``folder``, root included."""
    _run("mount", "--bind", str(folder), str(folder))
    try:
        _run("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def fill(folder: Path, *, but_bytes: int = 0) -> Path:
    """Takes all the space there is on the file system of ``folder`` but so much; returns the file that has it."""
    path = folder / f".filled-{secrets.token_hex(4)}"
    found = os.statvfs(folder)
    end_bytes, more_bytes = 0, found.f_bavail * found.f_frsize - but_bytes
    with path.open("wb") as file:
        while more_bytes >= found.f_frsize:  # less than that, as the file system takes some itself
            try:
                os.posix_fallocate(file.fileno(), end_bytes, more_bytes)
                end_bytes += more_bytes
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                more_bytes //= 2
            else:
                if but_bytes:
                    break
    return path


def cannot_limit_memory() -> str | None:
    """Why there can be no limit of memory here; None if there can."""
    if os.geteuid() != 0:
        return "it takes root to make a control group"
    return None if _memory_roots() else "there are no control groups that limit memory"


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yields a file that a process writes its id into, to have so much more memory than it has by then.

    Who takes more is killed. The processes must have ended before this does.
    """
    name = f"gracepoint-limit-{secrets.token_hex(4)}"
    cgroups.create(name)
    try:
        (root,) = _memory_roots()
        (limit,) = [root / name / file for file in _LIMIT_FILES if (root / name / file).exists()]
        limit.write_text(str(limit_bytes))
        yield root / name / "cgroup.procs"
    finally:
        cgroups.remove(name)


@contextlib.contextmanager
def processor_group(share: float, *, lowest: bool = False) -> Iterator[Path]:
    """Yields a file that processes write their ids into, to have so much of a core together.

    The processes must have ended, or left, before this does. ``lowest``: they get what the processes outside leave, as
    if they ran on another machine.
    """
    name = f"gracepoint-share-{secrets.token_hex(4)}"
    cgroups.create(name)
    try:
        quotas = [root / name / file for root in cgroup_roots() for file in ("cpu.cfs_quota_us", "cpu.max")]
        (quota,) = [file for file in quotas if file.exists()]
        quota.write_text(str(round(share * _PERIOD_US)))
        if lowest:
            (weight,) = [file for file in map(quota.with_name, ("cpu.shares", "cpu.weight")) if file.exists()]
            weight.write_text("2" if weight.name == "cpu.shares" else "1")
        yield quota.with_name("cgroup.procs")
    finally:
        cgroups.remove(name)


@contextlib.contextmanager
def limited(pid: int, share: float) -> Iterator[Callable[[], float]]:
    """Inside of this, a process that runs already has so much of a core.

    Yields what returns for how many seconds, by the kernel, it could not run as it had used that up.
    """
    with processor_group(share) as members:
        root = members.parent.parent
        before = root / _group_in(root, pid).lstrip("/") / members.name
        assert before.exists(), f"expected the control group of process {pid} at {before.parent}"
        members.write_text(str(pid))
        try:
            yield functools.partial(_held_back_s, members.with_name("cpu.stat"))
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                before.write_text(str(pid))


def _held_back_s(figures: Path) -> float:
    by_name = dict(line.split() for line in figures.read_text().splitlines())
    if "throttled_usec" in by_name:
        return int(by_name["throttled_usec"]) / 1e6
    return int(by_name["throttled_time"]) / 1e9  # version 1 has nanoseconds


def _group_in(root: Path, pid: int) -> str:
    """The control group of a process in a hierarchy."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or {*root.name.split(",")} & {*controllers.split(",")}:  # version 2 names none
            return group
    raise LookupError(f"process {pid} is in no control group of {root}")


def _memory_roots() -> list[Path]:
    return [
        root
        for root in cgroup_roots()
        if (root / "memory.limit_in_bytes").exists() or "memory" in _words(root / "cgroup.controllers")
    ]


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
