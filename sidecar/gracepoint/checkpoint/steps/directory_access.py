"""Checks that a job may use a directory: all its processes share it, no other job uses it, and no step is newer."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import cleanup, lease, listing
from gracepoint.checkpoint.steps.lease import Lease
from gracepoint.checkpoint.steps.process_zero import by_process_zero
from gracepoint.checkpoint.storage import room, undeleted
from gracepoint.checkpoint.storage.checks import appears
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, CheckpointExists
from gracepoint.process_group import ProcessGroup

#: Seconds after which a file that another machine wrote must be visible on a network file system.
_APPEARS_S = 5.0
#: Seconds between two tries to take the lease where the storage is full.
_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class DirectoryAccess:
    """The use of one directory by this gang: all processes see the same storage, and no other job uses it.

    Args:
        paths: The directory.
        gang: The processes that use it together.
        key: Prefix of the keys of the collective calls. Nothing else uses it.
        attempt: Unique for each start of the gang; the same in all its processes.
        clock: Returns monotonic seconds.
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
        self._shared_checks = 0  # a key is good for one barrier, and a check that failed may be made again
        self._claims = 0

    def check_shared(self, *, timeout_s: float) -> None:
        """Checks that all processes see the same directory, and not each a disk of its own. Collective.

        Without this check the problem shows only at the first save. In a job without periodic saves that is the
        emergency save.

        Raises:
            CheckpointError: Process 0 cannot write there, or another process does not see what it wrote.
            BarrierError: Other processes did not take part in time.
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
        sees = "yes" if appears(probe, within_s=_APPEARS_S, sleep=time.sleep) else "no"
        answers = gang.gather(f"{key}/seen", sees, timeout_s=deadline.remaining_s())
        if gang.process_index == 0:
            with undeleted.telling(probe):
                probe.delete()
        blind = [str(process) for process, answer in enumerate(answers) if answer == "no"]
        if blind:
            raise CheckpointError(
                f"{paths.root} is not the same storage in all processes: process {', '.join(blind)} does not see "
                f"what process 0 wrote there. Mount one volume that all pods share at this path"
            )

    def claim(self, job: str, *, timeout_s: float, start: str | None = None) -> None:
        """Takes the directory's lease in process 0, so that no other job uses it until ``release``. Collective.

        Args:
            job: Unique to the job; the same in all its attempts. For example the UID of a JobSet.
            timeout_s: Seconds for the call. It waits at most ``lease.PATIENCE_S`` of them for another job's lease.
            start: The part of the attempt up to the last "-", which all attempts of one start of the job share. Two
                clusters of one start must not use the directory. None: this is not checked.

        Raises:
            CheckpointError: Another job, or another cluster of the same start, uses the directory, or process 0
                cannot write there. Raised in all processes.
            BarrierError: Process 0 did not answer in time.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self._claims += 1

        def take() -> str:
            patience = Deadline.after(min(lease.PATIENCE_S, deadline.remaining_s()), self._clock)
            with self._naming_the_folder():
                while not self._taken(job, start, patience):
                    time.sleep(_LOOK_EVERY_S)
            return ""

        by_process_zero(take, gang=self._gang, key=f"{self._key}/lease/{self._claims}", deadline=deadline)

    def _taken(self, job: str, start: str | None, patience: Deadline) -> bool:
        """Takes the lease. Returns False if the storage is full, and may have room soon.

        What saves left unfinished goes only once no other job uses the directory.
        """
        paths = self._paths
        try:
            paths.root.make_folder_durably()
            paths.root.check_usable()
            self._lease = lease.claim(paths, job, self._attempt, deadline=patience, sleep=time.sleep, start=start)
        except OSError as error:
            if not room.is_full(error):
                raise
            lease.wait_until_free(paths, job, self._attempt, deadline=patience, sleep=time.sleep, start=start)
            freed = cleanup.make_room(paths, self._attempt)
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
            is_file = isinstance(error, FileExistsError)
            found = "expected a folder, found a file" if is_file else room.explained(error, self._paths.root)
            raise CheckpointError(f"process 0 cannot write to {self._paths.root}: {found}") from error


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
