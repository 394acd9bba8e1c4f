"""Who uses a checkpoint directory now: two jobs started on one by mistake would delete and restore each other's steps.

Process 0 of a job keeps a small file there, the **lease**, and writes it anew every ``BEAT_S``, in a thread of its own
("gracepoint-lease", daemon) that ends with ``release`` or when the lease is another's. A lease that has not changed for
``EXPIRES_S`` by the file system's own clock is nobody's; one whose holder ran on this machine and runs no more is so
at once.

A later attempt of the same job (a JobSet has one UID in all its attempts) takes the lease over without waiting: an
earlier one may still be writing its emergency save, which ``restore`` waits for. The earlier one sees that, and its
thread ends. Another job waits ``PATIENCE_S`` for the holder to go, and is refused then. So is another cluster of the
**same start** of the job: its processes were split, and each part takes itself for the whole. What was started again in
the pod of the holder (same host, another process namespace) takes over at once, as only one container trains there.

Where there is no lease, exactly one of several that come at once gets it: by a hard link of the whole file, which fails
where there is one. File systems without hard links give it to the one that creates the file (``O_EXCL``), empty, and
renames the whole one over it. A lease that stays empty is of a process that died in between, and expires as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError

logger = logging.getLogger(__name__)

BEAT_S = 10.0
EXPIRES_S = 35.0
#: Longer than EXPIRES_S, so that a job which was killed never keeps another out.
PATIENCE_S = 45.0
_LOOK_EVERY_S = 0.5
_END_S = 1.0


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lease: a process of a job.

    Attributes:
        job: The same in all attempts of a job, and no other's.
        attempt: Of the job.
        host: Name of the machine, in a pod the pod's.
        process: Tells the process from all others of that machine, dead ones too.
    """

    job: str
    attempt: str
    host: str
    process: str

    @classmethod
    def here(cls, job: str, attempt: str) -> Holder:
        return cls(job, attempt, os.uname().nodename, _process(os.getpid()))

    def is_gone(self) -> bool:
        """True if it ran on this machine and runs no more; False also where that cannot be known from here."""
        here = Holder.here(self.job, self.attempt)
        same_machine = self.host == here.host and self._namespace == here._namespace  # noqa: SLF001  of this class
        return same_machine and self.process != _process(int(self.process.split(":")[1]))

    def was_before(self, other: Holder) -> bool:
        """True if ``other`` runs in the pod in which this one ran: only one container trains there, so this one ended.

        Pods of a JobSet have host names of their own, which stay when one is replaced.
        """
        return self.host == other.host and self._namespace != other._namespace

    @property
    def _namespace(self) -> str:
        return self.process.split(":")[0]


#: Of a lease that was taken by a process that has not written its name yet.
UNNAMED = Holder("", "", "", "")


class Lease:
    """A held lease; made by ``claim``."""

    def __init__(self, path: Path, mine: Holder, start: str | None = None) -> None:
        self._path = path
        self._mine = mine
        self._start = start
        self._ended = threading.Event()
        self._taken_by: Holder | None = None  # written by the thread, once
        self._thread = threading.Thread(target=self._beat, name="gracepoint-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError if another job, or another cluster of the same start, has taken the directory over."""
        if self._taken_by is not None:
            raise CheckpointError(_in_use(self._path.parent, self._taken_by, self._mine, "has taken it over"))

    def release(self) -> None:
        """Gives the directory up. Never raises; safe to repeat."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(_END_S)
        with contextlib.suppress(OSError):
            if _read(self._path) == self._mine:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                found = _read(self._path)
                if found is not None and found != self._mine:
                    self._lost_to(found)
                    return
                _write(self._path, self._mine)
            except (OSError, CheckpointError) as error:
                logger.warning("the lease of %s was not renewed: %s", self._path.parent, error)

    def _lost_to(self, other: Holder) -> None:
        if other.job == self._mine.job and not _is_of_start(other, self._start):
            logger.info("attempt %s has taken %s over", other.attempt, self._path.parent)
            return
        self._taken_by = other
        logger.error("%s", _in_use(self._path.parent, other, self._mine, "has taken it over"))


def claim(
    paths: Layout,
    job: str,
    attempt: str,
    *,
    deadline: Deadline,
    sleep: Callable[[float], object],
    start: str | None = None,
) -> Lease:
    """Takes the lease of a directory, which must exist.

    Args:
        paths: The directory.
        job: The same in all attempts of the job, and no other's.
        attempt: Of the job; no two clusters have the same.
        deadline: Until when another holder is waited for.
        sleep: Waits so many seconds.
        start: How the attempts of this start of the job begin, up to the last "-"; None: not known.

    Raises:
        CheckpointError: Another job, or another cluster of the same start, holds it when ``deadline`` has passed.
        OSError: The directory cannot be written to.
    """
    path, mine = paths.lease(), Holder.here(job, attempt)
    told = False
    while (found := _read(path)) is not None and not _may_be_taken(paths, path, found, mine, start):
        if deadline.passed():
            raise CheckpointError(_in_use(paths.root, found, mine, "uses it"))
        if not told:
            told = True
            logger.warning("%s; waiting for it to end", _in_use(paths.root, found, mine, "uses it"))
        sleep(_LOOK_EVERY_S)
    if not _write(path, mine, only_if_none=found is None):
        # Somebody was faster.
        return claim(paths, job, attempt, deadline=deadline, sleep=sleep, start=start)
    return Lease(path, mine, start)


def _is_of_start(holder: Holder, start: str | None) -> bool:
    return start is not None and holder.attempt.rpartition("-")[0] == start


def _may_be_taken(paths: Layout, path: Path, found: Holder, mine: Holder, start: str | None) -> bool:
    if (found.host, found.process) == (mine.host, mine.process) or found.is_gone():
        return True
    if found.job == mine.job and (not _is_of_start(found, start) or found.was_before(mine)):
        return True
    try:
        beat_s = path.stat().st_mtime
    except FileNotFoundError:
        return True
    return commit.file_system_now_s(paths) - beat_s > EXPIRES_S


def _in_use(root: Path, by: Holder, mine: Holder, how: str) -> str:
    if by == UNNAMED:
        return (
            f"{root}: another job has just begun to use it, or died while it did: its lease is empty. It is free when "
            f"it has not changed for {EXPIRES_S:.0f} s"
        )
    if by.job == mine.job:
        return (
            f"{root}: another cluster of this same start of the job {how}: attempt {by.attempt}, on {by.host}; this "
            f"one is attempt {mine.attempt}, on {mine.host}. The job's processes were split into clusters that would "
            f"overwrite each other's steps: have all pods join one, with the same coordinator address and "
            f"the number of all processes, as attach() does where jax.distributed is not initialised before it"
        )
    return (
        f"{root}: another job {how}: {by.job} (attempt {by.attempt}, on {by.host}). Two jobs in one checkpoint "
        f"directory would restore and delete each other's steps: give each its own, or end the other one"
    )


def _process(pid: int) -> str:
    """Returns namespace, number and start of a process; other text where there is none of that number."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    try:
        # After the name in parentheses, which may hold anything: field 22 of proc(5) is the start time.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{namespace}:{pid}:{started}"


def _read(path: Path) -> Holder | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if not data:
        return UNNAMED
    try:
        return Holder(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a lease of Gracepoint's: {error}; delete it if no job runs here"
        ) from error


def _write(path: Path, mine: Holder, *, only_if_none: bool = False) -> bool:
    """Writes the lease as a whole; False if there must be none, and is one. Not synced: it is worth nothing later."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(json.dumps(dataclasses.asdict(mine)))
        if only_if_none:
            _put_first(partial, path)
        else:
            os.replace(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def _put_first(partial: Path, path: Path) -> None:
    """Gives ``partial`` the name ``path`` if nothing has it: of several processes at once, one succeeds.

    Raises:
        FileExistsError: Something has it.
        OSError: It cannot be written there.
    """
    try:
        os.link(partial, path)  # fails if there is one, as a rename does not
        return
    except FileExistsError:
        raise
    except OSError as error:
        # EPERM, EOPNOTSUPP, ENOSYS, EXDEV, EMLINK: file systems refuse hard links with many of them. If it is another
        # problem, creating the file meets it, too.
        logger.debug("%s: no hard link, so the lease is created: %s", path, error)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fsync(descriptor)  # some file systems of object stores make the file only now
    finally:
        os.close(descriptor)
    try:
        os.replace(partial, path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
