"""The lease of a checkpoint directory, which keeps two jobs from using one directory at the same time.

Two jobs that use one directory by mistake would delete and restore each other's steps.

Process 0 of a job keeps a small file in the directory, the **lease**, and rewrites it every ``BEAT_S`` seconds. It does
so in a separate thread ("gracepoint-lease", a daemon). The thread ends at ``release``, or when another process has
taken the lease. A lease expires if it has not changed for ``EXPIRES_S`` seconds by the file system's clock. If the
holder ran on this machine and has ended, the lease expires at once.

A later attempt of the same job takes the lease over without waiting. (A JobSet has one UID in all its attempts.) The
earlier attempt may still be writing its emergency save, which ``restore`` waits for. It finds that it has lost the
lease, and its thread ends. Another job waits ``PATIENCE_S`` seconds for the holder to end, and is then refused. Another
cluster of the **same start** of the job is refused in the same way: the processes were split into clusters, and each
cluster takes itself for the whole job. A container that restarts in the pod of the holder has the same host and another
process namespace. It takes the lease over at once, as only one container of a pod trains.

If there is no lease, and several processes want it at the same time, ``create`` of the store gives it to exactly one.
If several processes take the same lease over, ``replace`` gives it to exactly one. On file systems without hard links
the file is empty for a moment. If its writer dies in that moment, the file stays empty and expires like any lease.

The lease is one of the checks that a job may use a directory: all its processes share it, no other job uses it, and no
step is newer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from gracepoint import machine
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import listing, retention
from gracepoint.checkpoint.steps.commit import by_process_zero
from gracepoint.checkpoint.storage import checks, undeleted
from gracepoint.checkpoint.storage.checks import appears
from gracepoint.checkpoint.storage.storage_path import Generation, StaleGeneration, StoragePath, ended_by
from gracepoint.deadline import Backoff, Deadline
from gracepoint.errors import CheckpointError, CheckpointExists, StorageAway
from gracepoint.process_group import ProcessGroup, StorageWait
from gracepoint.threads import DaemonThread, is_forked

logger = logging.getLogger(__name__)

BEAT_S = 10.0
EXPIRES_S = 35.0
#: Seconds to wait for another holder. Longer than EXPIRES_S, so that a killed job never keeps another one out.
PATIENCE_S = 45.0
_LOOK_EVERY_S = 0.5
_END_S = 1.0  # to wait for the lease's thread
_UNIQUE = 32  # characters


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        job: Identifier of the job. The same in all attempts of the job, and different from that of any other job.
        attempt: Identifier of the attempt of the job.
        host: Name of the machine. In a pod: name of the pod.
        process: Identifier of the process, unique among all processes of that machine, ended ones included.
    """

    job: str
    attempt: str
    host: str
    process: str

    @classmethod
    def here(cls, job: str, attempt: str) -> Holder:
        return cls(job, attempt, machine.host_name(), machine.process_identity(machine.process_id()))

    def is_gone(self) -> bool:
        """Returns whether the holder ran on this machine and has ended. False if this cannot be known here."""
        here = Holder.here(self.job, self.attempt)
        same_machine = self.host == here.host and self._namespace == here._namespace  # noqa: SLF001  of this class
        return same_machine and self.process != machine.process_identity(int(self.process.split(":")[1]))

    def was_before(self, other: Holder) -> bool:
        """Returns whether ``other`` runs in the pod in which this holder ran. Then this holder has ended.

        Only one container of a pod trains. Each pod of a JobSet has its own host name, which its replacement keeps.
        """
        return self.host == other.host and self._namespace != other._namespace

    @property
    def _namespace(self) -> str:
        return self.process.split(":")[0]


#: Holder of an empty lease: the process that created the file has not written its name yet.
UNNAMED = Holder("", "", "", "")


class Lease:
    """A held lease. ``claim`` creates it."""

    def __init__(self, path: StoragePath, holder: Holder, start: str | None = None) -> None:
        self._path = path
        self._mine = holder
        self._start = start
        self._ended = threading.Event()
        self._is_released = False
        self._taken_by: Holder | None = None  # written by the thread, once
        self._pid = machine.process_id()
        self._thread = DaemonThread(self._beat, "gracepoint-lease")
        try:
            self._thread.start()
        except BaseException:
            self._ended.set()  # nobody gets this object, so nobody would end its thread
            raise

    @property
    def is_held(self) -> bool:
        """True until ``release``, or until another process has taken the lease. A forked child holds no lease."""
        return not self._ended.is_set() and not self._thread.ended

    def check(self) -> None:
        """Raises CheckpointError if another job, or another cluster of the same start, has taken the directory over."""
        if self._taken_by is not None:
            raise CheckpointError(_in_use(self._path.parent, self._taken_by, self._mine, "has taken it over"))

    def release(self) -> None:
        """Gives up the lease, and ends its thread. Never raises. May be called again, also if it was interrupted.

        In a forked child it does nothing: the lease is its parent's.
        """
        if self._is_released or is_forked(self._pid):
            return
        self._ended.set()
        self._thread.wait(_END_S)
        self._delete()
        self._is_released = True

    def _delete(self) -> None:
        # CheckpointError: somebody wrote something else there.
        with contextlib.suppress(CheckpointError), undeleted.deleting(self._path):
            current = _read(self._path)
            if current is None or current[0] != self._mine:
                return
            # Only this version: a request can reach the store twice, the second time when another process holds the
            # lease.
            self._path.delete_version(current[1])

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                current = _read(self._path)
                if current is not None and current[0] != self._mine:
                    self._lost_to(current[0])
                    return
                if self._ended.is_set():  # ``release`` has deleted it meanwhile
                    return
                # Conditional: if another process has written the lease meanwhile, the next beat reads its name.
                _written(self._path, self._mine, None if current is None else current[1])
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
        job: Identifier of the job. The same in all attempts of the job, and different from that of any other job.
        attempt: Identifier of the attempt. No two clusters have the same.
        deadline: When to stop waiting for another holder.
        sleep: Waits for a number of seconds.
        start: The part of ``attempt`` up to the last "-", which all attempts of one start of the job share. None: it is
            not known.

    Raises:
        CheckpointError: Another job, or another cluster of the same start, still holds the lease at ``deadline``.
        OSError: The directory cannot be written to.
    """
    path, holder = paths.lease(), Holder.here(job, attempt)
    current = wait_until_free(paths, job, attempt, deadline=deadline, sleep=sleep, start=start)
    if not _written(path, holder, current):
        # Another process has written the lease meanwhile.
        return claim(paths, job, attempt, deadline=deadline, sleep=sleep, start=start)
    return Lease(path, holder, start)


def wait_until_free(
    paths: Layout,
    job: str,
    attempt: str,
    *,
    deadline: Deadline,
    sleep: Callable[[float], object],
    start: str | None = None,
) -> Generation | None:
    """Waits until nobody else holds the lease. Returns the generation of the file. None: there is none.

    Arguments and errors are those of ``claim``. Only reads.
    """
    path, holder = paths.lease(), Holder.here(job, attempt)
    logged = False
    while (current := _read(path)) is not None and not _may_be_taken(paths, path, current[0], holder, start):
        if deadline.passed():
            raise CheckpointError(_in_use(paths.root, current[0], holder, "uses it"))
        if not logged:
            logged = True
            logger.warning("%s; waiting for it to end", _in_use(paths.root, current[0], holder, "uses it"))
        sleep(max(_LOOK_EVERY_S, paths.root.look_every_s))
    return None if current is None else current[1]


def _is_of_start(holder: Holder, start: str | None) -> bool:
    return start is not None and holder.attempt.rpartition("-")[0] == start


def _may_be_taken(paths: Layout, path: StoragePath, current: Holder, holder: Holder, start: str | None) -> bool:
    if (current.host, current.process) == (holder.host, holder.process) or current.is_gone():
        return True
    if current.job == holder.job and (not _is_of_start(current, start) or current.was_before(holder)):
        return True
    entry = path.entry()
    return entry is None or paths.root.now_s() - entry.changed_s > EXPIRES_S


def _in_use(root: StoragePath, by: Holder, holder: Holder, how: str) -> str:
    if by == UNNAMED:
        return (
            f"{root}: another job has just begun to use it, or died while it did: its lease is empty. It is free when "
            f"it has not changed for {EXPIRES_S:.0f} s"
        )
    if by.job == holder.job:
        return (
            f"{root}: another cluster of this same start of the job {how}: attempt {by.attempt}, on {by.host}; this "
            f"one is attempt {holder.attempt}, on {holder.host}. The job's processes were split into clusters that "
            f"would overwrite each other's steps: have all pods join one, with the same coordinator address and "
            f"the number of all processes, as attach() does where jax.distributed is not initialised before it"
        )
    return (
        f"{root}: another job {how}: {by.job} (attempt {by.attempt}, on {by.host}). Two jobs in one checkpoint "
        f"directory would restore and delete each other's steps: give each its own, or end the other one"
    )


def _read(path: StoragePath) -> tuple[Holder, Generation] | None:
    """Returns the holder of the lease, and the generation of the file. None if there is no lease."""
    try:
        value = path.read()
    except FileNotFoundError:
        return None
    if not value.data:
        return UNNAMED, value.generation
    try:
        return Holder(**json.loads(value.data)), value.generation
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a lease of Gracepoint's: {error}; delete it if no job runs here"
        ) from error


def _written(path: StoragePath, holder: Holder, generation: Generation | None) -> bool:
    """Writes the lease, unless another process has written it since ``generation``. Returns whether it was written.

    ``generation`` is None if there was no lease. The file is not synced, as a lease is of no use after a crash.
    """
    # White space that differs each time: in some stores the generation is a digest of the contents.
    unique = "".join(secrets.choice(" \t\r\n") for _ in range(_UNIQUE))
    data = (json.dumps(dataclasses.asdict(holder)) + unique).encode()
    try:
        if generation is None:
            path.create(data)
        else:
            path.replace(data, generation)
    except (FileExistsError, StaleGeneration):
        return False
    return True


#: Seconds after which a file that another machine wrote must be visible on a network file system.
_APPEARS_S = 5.0
#: Seconds between two tries to take the lease where the storage is full.
_ACCESS_LOOK_EVERY_S = 1.0
#: The longest pause before the next look at storage that is away.
_AWAY_PAUSE_S = 30.0
#: Seconds for ``check_shared``: longer than a store's client tries to reach it, so that a process to which it does not
#: answer can say so.
SHARED_TIMEOUT_S = 90.0
#: What stands for no limit in the requests of JAX's store: three weeks, in milliseconds below 2**31.
_LONGEST_S = 21 * 86400.0


class DirectoryAccess:
    """The use of one directory by this gang: all processes see the same storage, and no other job uses it.

    Args:
        paths: The directory.
        gang: The processes that use it together.
        key: Prefix of the keys of the collective calls. Nothing else uses it.
        attempt: Unique for each start of the gang; the same in all its processes.
        clock: Returns monotonic seconds.

    Attributes:
        waits: The claim that is made now, as the stall watch sees it. None: none is made. Any thread may read it.
    """

    def __init__(
        self, paths: Layout, gang: ProcessGroup, *, key: str, attempt: str, clock: Callable[[], float]
    ) -> None:
        self._paths = paths
        self._gang = gang
        self._key = key
        self._attempt = attempt
        self._clock = clock
        self._lease: Lease | None = None
        self._later: Callable[[float | None, float], None] | None = None  # takes the lease that was put off
        self._limit: _Answering | None = None
        self._shared_checks = 0  # a key is good for one barrier, and a check that failed may be made again
        self._claims = 0
        self.waits: StorageWait | None = None

    def check_shared(self, *, timeout_s: float = SHARED_TIMEOUT_S) -> None:
        """Checks that all processes see the same directory, and not each a disk of its own. Collective.

        Without this check the problem shows only at the first save. In a job without periodic saves that is the
        emergency save.

        Raises:
            CheckpointError: Process 0 cannot write there, or another process does not see what it wrote.
            BarrierError: Other processes did not take part in time.
            StorageAway: The storage does not answer a process. Raised in all processes.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self._shared_checks += 1
        key = f"{self._key}/shared/{self._shared_checks}"
        paths, gang = self._paths, self._gang
        if gang.process_count == 1:
            return
        probe = paths.shared_probe(self._attempt)

        def write() -> str:
            with self._naming_the_folder():
                paths.root.make_folder_durably()
                probe.touch()
            return ""

        by_process_zero(write, gang=gang, key=f"{key}/written", deadline=deadline)
        try:
            sees = "yes" if appears(probe, within_s=_APPEARS_S, sleep=time.sleep) else "no"
        except OSError as error:
            if not checks.is_away(error):
                raise
            sees = f"process {gang.process_index} does not reach {paths.root}: {error}"
        answers = gang.gather(f"{key}/seen", sees, timeout_s=deadline.remaining_s())
        if gang.process_index == 0:
            with undeleted.deleting(probe):
                probe.delete()
        if away := [answer for answer in answers if answer not in ("yes", "no")]:
            raise StorageAway("; ".join(away))
        blind = [str(process) for process, answer in enumerate(answers) if answer == "no"]
        if blind:
            raise CheckpointError(
                f"{paths.root} is not the same storage in all processes: process {', '.join(blind)} does not see "
                f"what process 0 wrote there. Mount one volume that all pods share at this path"
            )

    def claim(
        self,
        job: str,
        *,
        timeout_s: float,
        start: str | None = None,
        away_s: float = 0.0,
        on_away: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes the directory's lease in process 0, so that no other job uses it until ``release``. Collective.

        Args:
            job: Unique to the job; the same in all its attempts. For example the UID of a JobSet.
            timeout_s: Seconds for the call. It waits at most ``lease.PATIENCE_S`` of them for another job's lease.
            start: The part of the attempt up to the last "-", which all attempts of one start of the job share. Two
                clusters of one start must not use the directory. None: this is not checked.
            away_s: Seconds that process 0 waits in addition while the storage is away.
            on_away: Called in process 0 after each attempt that found it away.

        Raises:
            CheckpointError: Another job, or another cluster of the same start, uses the directory, or process 0
                cannot write there. Raised in all processes.
            BarrierError: Process 0 did not answer in time.
            StorageAway: The storage did not answer in time. Raised in all processes.
        """
        began_s = self._clock()
        deadline = Deadline.after(min(timeout_s + away_s, _LONGEST_S), self._clock)
        self._claims += 1

        def take() -> str:
            pauses = Backoff(_ACCESS_LOOK_EVERY_S, _AWAY_PAUSE_S)
            for tries in itertools.count(1):
                patience = Deadline.after(min(PATIENCE_S, deadline.remaining_s()), self._clock)
                try:
                    with self._naming_the_folder():
                        while not self._taken(job, start, patience):
                            self._sleep(_ACCESS_LOOK_EVERY_S)
                except StorageAway as error:
                    waited_s, pause_s = self._clock() - began_s, pauses.next_s()
                    if waited_s + pause_s > away_s:
                        raise
                    on_away()
                    self.waits = StorageWait(tries)
                    logger.warning("attach waits for storage seconds=%.0f error=%s", waited_s, error)
                    time.sleep(pause_s)
                else:
                    break
            return ""

        self.waits = StorageWait(0 if self._gang.process_index == 0 else None)
        try:
            by_process_zero(take, gang=self._gang, key=f"{self._key}/lease/{self._claims}", deadline=deadline)
        finally:
            self.waits = None

    def claim_if_there(
        self, job: str, *, timeout_s: float, start: str | None = None, away_s: float, answer_s: float
    ) -> bool:
        """Takes the lease as ``claim``, unless the storage is away. Then it is taken by ``claim_later``. Collective.

        Args:
            job: As ``claim``.
            timeout_s: As ``claim``.
            start: As ``claim``.
            away_s: As ``claim``, for ``claim_later``.
            answer_s: Seconds that the storage has for its answer now.

        Returns:
            Whether the lease is taken. False: the storage is away, in all processes.

        Raises:
            CheckpointError, BarrierError: As ``claim``.
        """

        def later(answer_s: float | None, within_s: float) -> None:
            with self._answering(answer_s):
                away_s_now = away_s if answer_s is None else 0.0
                self.claim(job, timeout_s=min(timeout_s, within_s), start=start, away_s=away_s_now)

        try:
            later(answer_s, timeout_s)
        except StorageAway as error:
            logger.warning("the storage is away, and its lease is taken later: %s", error)
            self._later = later
        return self._later is None

    @property
    def is_put_off(self) -> bool:
        """Whether the lease is not taken yet, as the storage was away. The same in all processes."""
        return self._later is not None

    def claim_later(self, *, answer_s: float | None = None, within_s: float = SHARED_TIMEOUT_S) -> None:
        """Takes the lease that was put off, if one was, and checks that all processes share the directory. Collective.

        To be called before anything is written to the directory, or read from it.

        Args:
            answer_s: Seconds that the storage has for its answer. None: it is waited for while it is away.
            within_s: Seconds for the whole call, but for that wait.

        Raises:
            CheckpointError, BarrierError, StorageAway: As ``claim`` and ``check_shared``.
        """
        if (later := self._later) is None:
            return
        deadline = Deadline.after(within_s, self._clock)
        later(answer_s, within_s)
        with self._answering(answer_s):
            self.check_shared(timeout_s=SHARED_TIMEOUT_S if answer_s is None else deadline.remaining_s())
        self._later = None

    @contextlib.contextmanager
    def _answering(self, answer_s: float | None) -> Iterator[None]:
        """Ends requests that take longer than ``answer_s`` as if the storage were away. None: there is no limit."""
        self._limit = None if answer_s is None else _Answering(answer_s, self._clock)
        try:
            with ended_by(self._limit):
                yield
        finally:
            self._limit = None

    def _sleep(self, pause_s: float) -> None:
        """Waits for another job, or for room. Until then the storage has answered."""
        time.sleep(pause_s)
        if self._limit is not None:
            self._limit.begin()

    def _taken(self, job: str, start: str | None, patience: Deadline) -> bool:
        """Takes the lease. Returns False if the storage is full, and may have room soon.

        What saves left unfinished goes only once no other job uses the directory.
        """
        paths = self._paths
        if self.holds_lease:  # a claim that was made later failed after this
            return True
        try:
            paths.root.make_folder_durably()
            paths.root.check_usable()
            self._lease = claim(paths, job, self._attempt, deadline=patience, sleep=self._sleep, start=start)
        except OSError as error:
            if not checks.is_full(error):
                raise
            wait_until_free(paths, job, self._attempt, deadline=patience, sleep=self._sleep, start=start)
            freed = retention.make_room(paths, self._attempt)
            if not freed and (patience.passed() or not paths.temporaries()):
                raise
            logger.warning("%s is full. Room is made among what earlier saves have left there", paths.root)
            return False
        return True

    @property
    def holds_lease(self) -> bool:
        """True if this process has taken the lease, and no other process has taken it over."""
        return self._lease is not None and self._lease.is_held

    def check_lease(self) -> None:
        """Raises CheckpointError if another job has taken the directory over. Without a lease, nothing is checked."""
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """Gives the lease back. Without a lease, nothing happens."""
        if self._lease is not None:
            self._lease.release()

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            if checks.is_away(error):
                raise StorageAway(f"process 0 does not reach {self._paths.root}: {error}") from error
            is_file = isinstance(error, FileExistsError)
            problem = "expected a folder, found a file" if is_file else checks.explained(error, self._paths.root)
            raise CheckpointError(f"process 0 cannot write to {self._paths.root}: {problem}") from error


class _Answering:
    """Ends requests after some seconds as if the storage were away."""

    def __init__(self, answer_s: float, clock: Callable[[], float]) -> None:
        self._answer_s = answer_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begins the seconds anew."""
        self._deadline = Deadline.after(self._answer_s, self._clock)

    def __call__(self) -> None:
        if self._deadline.passed():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self._answer_s:g} s")


def check_nothing_newer(paths: Layout, gang: ProcessGroup, *, key: str, step: int, deadline: Deadline) -> None:
    """Checks that the directory has no complete step that is ``step`` or newer. Collective.

    Raises:
        CheckpointExists: There is such a step. Raised in all processes.
        CheckpointError: Process 0 cannot list the directory. Raised in all processes.
        BarrierError: Process 0 did not answer in time.
    """

    def look() -> str:
        try:
            return json.dumps(max(listing.complete_steps(paths), default=None))
        except OSError as error:
            raise CheckpointError(f"process 0 cannot look into {paths.root}: {error}") from error

    newest = json.loads(by_process_zero(look, gang=gang, key=key, deadline=deadline))
    if newest is not None and newest >= step:
        raise CheckpointExists(
            f"save({step}): {paths.root} has a complete step {newest}, and nothing was restored. The next restore "
            "would take that one, not what is saved now: restore first, save to another directory, or say force=True"
        )
