"""What one process writes of a save, and the threads that write it.

A ``WriteJob`` is the input of every writer, and ``WrittenFiles`` its result.

Writers take calls from a queue, each with its own buffer. After its last write, a file must be synced, and then
reported (``Finish``). Syncers do both, so that no writer waits for a sync. A sync takes about as long as the writes of
a chunk, and the disk syncs several files in the time of one. Without syncers, the writers spend half of their time in
syncs, and the disk often has nothing to write. Every file is synced by its own ``fsync``, and a save waits for all of
them. At most ``_MOST_UNSYNCED`` files are open and wait for a sync. If there are more, the writers sync. For stores
that do not sync there are no syncers.

A worker process writes with more threads than there are idle cores. If a thread of a training step wakes up and no core
is idle, the kernel has it wait until a writer has used up its time slice, whatever the niceness of the writer is. So
the writers of a save that nobody waits for run as ``SCHED_IDLE`` (``IdlePriority``, ``size_beside_training``). The
kernel counts a core with only such threads as idle, and other threads of the same container take it at once. If other
threads keep all cores busy, a thread of ``SCHED_IDLE`` gets next to nothing: the kernel weighs it as 3, and a thread of
niceness 0 as 1024. So threads stop giving way in two cases: the save is urgent, or the threads are starved
(``Starvation``). A thread cannot leave ``SCHED_IDLE`` without a privilege. So new threads take the work over, as many
as write fastest. The old ones end, and a file that one of them was writing is written again.

Threads:

* The thread that makes the pool calls ``begin``, ``add``, ``wait``, ``close`` and ``join``, and ``begin`` and ``end``
  of an ``IdlePriority``.
* The threads that write and sync call ``run`` and ``must_end`` of the ``IdlePriority``. All of them end after
  ``close``, or with the first error.
* One daemon thread ("gracepoint: watches writers") watches whether one of the two cases has come. It ends when it has
  started the new threads, or with ``end``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, Format
from gracepoint.checkpoint.format.records import StoredFile
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import Buffer, Later, UnsyncedFile, checksum_of
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.threads import NoThread, start_thread


class ChunkSource(Protocol):
    """Supplies the chunks of a save."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once. Its values do not change until ``written`` is called for it.

        They may be in any memory order, and of another type than the stored one.
        """

    def written(self, chunk: Chunk) -> None:
        """Is called for each chunk whose values are no longer needed, from any thread."""


class PartSource(ChunkSource, Protocol):
    """Supplies the chunks of one process's part of a save."""

    def check_unchanged(self) -> None:
        """Raises SaveFailed if the values are not those any more that the source was made with."""


class SaveSource(PartSource, Protocol):
    """Supplies the chunks of a save that a worker process may write."""

    def written_elsewhere(self) -> None:
        """Is called in place of the others if a worker process, which has the chunks, too, has written them."""


#: Writes an object of a save: its path, its bytes, their CRC-32, and what ends the write by an error.
Place = Callable[[str, ArrayBytes, int, Callable[[], None]], None]


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """This process's part of a save.

    Attributes:
        folder: The save's temporary folder. It exists.
        item: Name of the train state's folder below ``folder``.
        specs: What is stored of each leaf that the chunks and ``arrays`` refer to, by index of the leaf.
        arrays: Indices of the leaves whose own metadata is written.
        source: Supplies the chunks.
        small_files: Contents of other files by path below ``folder``.
        tree_numbers: Candidate numbers for the chunks' tree in OCDBT. The job uses the first number whose tree does
            not exist yet, so that nobody else writes that tree. In a store that cannot rename, it uses the first
            number, and its trees have random names besides. A job that writes no array has no tree.
        is_urgent: Returns whether somebody waits for the save. Until then, threads that write plain values to a file
            system leave the CPU to other threads. None: they do not.
        place: In a store that cannot rename, writes an object durably where it may be now
            (``steps.object_steps.Placement.place``). None: files are written below ``folder``.
    """

    folder: StoragePath
    item: str
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    source: ChunkSource
    small_files: Mapping[str, bytes]
    tree_numbers: Iterable[int] = (0,)
    is_urgent: Callable[[], bool] | None = None
    place: Place | None = None

    @property
    def form(self) -> Format:
        """The format of the arrays, which is the same for all arrays of a save."""
        return next(iter(self.specs.values())).format if self.specs else Format()


@dataclasses.dataclass(frozen=True)
class WrittenFiles:
    """What one process wrote of a save.

    Attributes:
        files: Size and checksum of each file, by path below the checkpoint's folder.
        values: CRC-32 of the values of each chunk that has no file (in OCDBT), or whose file is compressed, by path.
        copies: CRC-32 of the values of each chunk that another process writes, by path.
        chunk_bytes: Size of the values of all chunks that were written.
    """

    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: dict[str, int] = dataclasses.field(default_factory=dict)
    chunk_bytes: int = 0


#: Writers of a save to a file system. There may be more than cores, as writers mostly wait for the disk.
THREADS = 8
#: Writers of a save to an object store, each with a connection. One connection has a small part of the bandwidth.
OBJECT_THREADS = 16
#: Syncers of a save to a file system. They only wait, and the disk syncs the files of all of them at once. Eight were
#: no faster.
SYNCERS = 4


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """How many threads a pool has.

    Attributes:
        writers: Each has a separate buffer.
        syncers: 0 if the store does not sync.
    """

    writers: int
    syncers: int


def size_for(folder: StoragePath) -> PoolSize:
    """Returns how many threads write a save as fast as they can, or beside training where the folder says so."""
    if folder.niceness:
        return PoolSize(size_beside_training().writers, 0)
    return PoolSize(OBJECT_THREADS, 0) if folder.is_far else PoolSize(THREADS, SYNCERS)


def size_beside_training(cores: int | None = None) -> PoolSize:
    """Returns how many threads write a save to a file system that nobody waits for.

    On two cores, each thread beyond two slowed the training step down: by 16% with eight writers and four syncers, and
    by 0.4% with two writers and one syncer (``python -m benchmarks.async_calls``; docs/decisions/0051).

    Args:
        cores: How many cores there are. None: as many as this process can use.
    """
    cores = machine.available_cores() if cores is None else cores
    return PoolSize(min(THREADS, max(2, cores)), min(SYNCERS, max(1, cores // 2)))


@dataclasses.dataclass(frozen=True)
class Finish:
    """What is left to do of a file that is written.

    Attributes:
        file: The file. It must be synced or dropped.
        then: Called after the sync.
    """

    file: UnsyncedFile
    then: Callable[[], None]


#: Writes something with the thread's buffer. Returns what is left to do; None: nothing.
Act = Callable[[Buffer], Finish | None]


logger = logging.getLogger(__name__)

#: Seconds for what is being written to end after one write has failed: what was written is deleted next.
FAILED_ENDS_S = 10.0
#: Seconds without enough processor time after which threads are starved.
PATIENCE_S = 5.0
# The threads are starved if all of them together get less than this part of one core.
_ENOUGH_CORES = 0.1
_LOOK_EVERY_S = 0.05
# Number of looks for starvation within the patience.
_LOOKS = 10


class Starvation:
    """Decides when threads are starved. Pure: the times are given to it.

    Threads are starved if two things hold for the last ``patience_s`` seconds. All threads together got less than a
    tenth of a core. And at more than half of the looks, at least one of them was ready to run. A thread that waits for
    the disk is not ready.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._looks: list[tuple[float, float, bool]] = []  # within the patience

    def look(self, now_s: float, cpu_s: float, *, ready: bool) -> bool:
        """Returns whether the threads are starved.

        Args:
            now_s: Monotonic seconds.
            cpu_s: Processor seconds that the threads have used.
            ready: Whether any of them runs, or is ready to run.
        """
        self._looks.append((now_s, cpu_s, ready))
        if now_s - self._looks[0][0] < self._patience_s:
            return False
        passed_s, used_s = now_s - self._looks[0][0], cpu_s - self._looks[0][1]
        mostly_ready = 2 * sum(ready for _, _, ready in self._looks) > len(self._looks)
        self._looks = [look for look in self._looks if now_s - look[0] < self._patience_s]
        return mostly_ready and used_s < _ENOUGH_CORES * passed_s


class IdlePriority:
    """The threads of one save that give way.

    Args:
        is_urgent: Returns whether somebody waits for the save. It is not called again after it has returned True.
        patience_s: See ``Starvation``.
    """

    def __init__(self, is_urgent: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
        self._is_urgent = is_urgent
        self._patience_s = patience_s
        self._threads: set[int] = set()  # the kernel's numbers of the threads that give way
        self._over = self._ended = False
        self._wake = threading.Event()
        self._watching: threading.Thread | None = None

    def begin(self, take_over: Callable[[], bool]) -> bool:
        """Returns whether threads give way from now on. They do not if the save is urgent, or if no thread can watch.

        Args:
            take_over: Starts threads that do not give way, and returns whether all of them were started. Called once at
                most, in another thread.
        """
        if self._is_urgent():
            return False
        watching = threading.Thread(
            target=self._watch, args=[take_over], name="gracepoint: watches writers", daemon=True
        )
        try:
            start_thread(watching)
        except NoThread as error:  # no thread could say that the save has become urgent
            logger.warning("the threads of a save do not give way to the training: %s", error)
            return False
        self._watching = watching
        return True

    def run(self, function: Callable[[], None]) -> None:
        """Calls ``function``. The calling thread gives way until it ends, and so do threads that it starts."""
        try:
            machine.run_when_idle()
        except OSError as error:
            logger.info("a thread of a save does not give way to the training: %s", error)
        else:
            self._threads.add(threading.get_native_id())
        function()

    def must_end(self) -> bool:
        """Returns whether the calling thread gives way and must end, as other threads have taken over."""
        return self._over and threading.get_native_id() in self._threads

    def end(self) -> None:
        """Ends the watching thread. No thread is started after this returns."""
        self._ended = True
        self._wake.set()
        if self._watching is not None:
            # Not for long: the thread waits for the event alone. Otherwise it only looks, and starts threads.
            self._watching.join()

    def _watch(self, take_over: Callable[[], bool]) -> None:
        try:
            reason = self._wait()
        except Exception as error:  # noqa: BLE001 - they might be starved, and nobody would look again
            reason = f"it is not known whether they run: {error!r}"
        if reason:
            logger.info("the threads of a save do not give way any more, as %s", reason)
            self._over = take_over()

    def _wait(self) -> str:
        """Waits until the threads must not give way any more, and returns why. Empty: the save has ended."""
        starvation, look_at_s = Starvation(self._patience_s), 0.0
        while not self._ended:
            if self._is_urgent():
                return "it is urgent"
            if (now_s := time.monotonic()) >= look_at_s:
                look_at_s = now_s + self._patience_s / _LOOKS
                cpu_s, ready = machine.cpu_time(list(self._threads))
                if starvation.look(now_s, cpu_s, ready=ready):
                    return "the training leaves them no processor time"
            self._wake.wait(_LOOK_EVERY_S)
        return ""


# Bounds on files that wait in the queue. So many keep all threads busy. They hold little memory, even if the values are
# copies from a device.
_WAITING_BYTES = 16 << 20
_WAITING_FILES = 64
# Far below the usual limit on open files of a process, which is 1024.
_MOST_UNSYNCED = 64


class _TakenOver(Exception):
    """This thread must end. Another thread writes the file again."""


class WritePool:
    """The threads of one save.

    Args:
        buffers: Each writer takes one of them, and puts it back when it ends.
        limit_bytes: Most bytes that are handed out and not yet durable. None: no limit.
        folder: Folder of the save.
        deadline: When the threads must have ended.
        idle_priority: Decides until when the threads give way to the training. None: they do not give way.
    """

    def __init__(
        self,
        buffers: list[Buffer],
        limit_bytes: int | None,
        folder: StoragePath,
        deadline: Deadline,
        idle_priority: IdlePriority | None = None,
    ) -> None:
        # Not in an object store: requests start threads that would give way, too. These threads also serve later
        # requests, and could never stop giving way.
        self._idle_priority = None if folder.is_far else idle_priority
        self._size = size_for(folder)
        self._buffers = buffers
        self._limit_bytes = limit_bytes
        self._folder = folder
        self._deadline = deadline
        self._waiting: collections.deque[tuple[int, Act]] = collections.deque()
        self._unsynced: collections.deque[tuple[int, Finish]] = collections.deque()
        self._waiting_bytes = self._unwritten_bytes = 0
        self._added = self._ended = 0
        self._closed = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # protects everything above
        self._has_work, self._has_room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._has_unsynced = threading.Condition(self._lock)
        self._writers: list[threading.Thread] = []
        self._syncers: list[threading.Thread] = []

    def begin(self) -> None:
        """Starts as many threads as the system allows, up to the wanted number.

        If no thread can be started, the calling thread writes. Python 3.12 starts no threads once the interpreter is
        about to end.
        """
        way = self._idle_priority
        self._start_all(way if way is not None and way.begin(self._start_all) else None)

    def add(self, size_bytes: int, act: Act) -> None:
        """Waits for room, and then has a thread call ``act`` with its buffer.

        Raises:
            SaveFailed: There was no room in time, or the save is stopped.
            BaseException: The error of an earlier call.
        """
        with self._lock:
            has_room = self._deadline.wait_for(self._has_room, lambda: self._may_wait(size_bytes))
            self._raise_error()
            if not has_room or self._deadline.passed():
                raise self._too_late()
            self._waiting.append((size_bytes, act))
            self._waiting_bytes += size_bytes
            self._unwritten_bytes += size_bytes
            self._added += 1
            self._has_work.notify()
        if not self._writers:
            self._write(wait=False)

    def wait(self) -> None:
        """Waits until all added calls have ended, and the files are synced.

        Raises:
            SaveFailed: Not all of them ended in time.
            BaseException: The first error of a call.
        """
        with self._lock:
            in_time = self._deadline.wait_for(
                self._has_room, lambda: self._error is not None or self._ended == self._added
            )
            self._raise_error()
            if not in_time:
                raise self._too_late()

    def close(self) -> None:
        """Has the threads end. Calls that have not started are dropped."""
        if self._idle_priority is not None:
            self._idle_priority.end()  # first: after this no thread is started any more
        with self._lock:
            self._closed = True
            self._has_work.notify_all()
            self._has_unsynced.notify_all()
        self._drop_unsynced()

    def join(self, most_s: float = math.inf) -> None:
        """Waits for the threads to end, for ``most_s`` seconds each at most: they then write nothing any more."""
        for thread in (*self._writers, *self._syncers):
            thread.join(min(most_s, self._deadline.remaining_s()))

    def go_on(self) -> None:
        """Raises an error if the calling thread must stop."""
        if self._stopped or self._deadline.passed():
            raise self._too_late()
        if self._is_taken_over:
            raise _TakenOver

    def _start_all(self, idle_priority: IdlePriority | None = None) -> bool:
        """Starts writers and syncers, with ``idle_priority`` if it is given. Returns whether all of them started."""
        write, sync, size = self._write, self._sync, self._size
        if niceness := self._folder.niceness:
            write = functools.partial(_write_nicely, self._write, niceness)
        if idle_priority is not None:
            write, sync = functools.partial(idle_priority.run, write), functools.partial(idle_priority.run, sync)
            size = size_beside_training()
        return _start(self._writers, size.writers, write, "writes") and _start(
            self._syncers, size.syncers, sync, "syncs"
        )

    def _write(self, *, wait: bool = True) -> None:
        """Runs in each writer, or in the calling thread, which does not ``wait`` for calls."""
        buffer = self._take_buffer()
        while (task := self._next(wait)) is not None:
            size_bytes, act = task
            finish, error = None, None
            try:
                finish = act(buffer)
            except _TakenOver:
                self._put_back(size_bytes, act)
                break
            except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
                error = raised
            del task, act  # frees the values, which may be copies from a device
            if finish is None:
                self._end(size_bytes, error)
            elif not self._sync_later(size_bytes, finish):
                self._finish(size_bytes, finish)
        if len(self._buffers) < self._size.writers:
            self._buffers.append(buffer)

    def _sync(self) -> None:
        """Runs in each syncer."""
        while True:
            with self._lock:
                self._deadline.wait_for(self._has_unsynced, lambda: bool(self._unsynced) or self._ends)
                if self._ends or not self._unsynced:
                    break
                size_bytes, finish = self._unsynced.popleft()
            self._finish(size_bytes, finish)
        if self._stopped:
            self._drop_unsynced()

    def _sync_later(self, size_bytes: int, finish: Finish) -> bool:
        """Hands a file to the syncers. Returns False if the caller must sync it."""
        with self._lock:
            if not self._syncers or self._stopped or len(self._unsynced) >= _MOST_UNSYNCED:
                return False
            self._unsynced.append((size_bytes, finish))
            self._has_unsynced.notify()
            return True

    def _finish(self, size_bytes: int, finish: Finish) -> None:
        error: BaseException | None = None
        try:
            if self._stopped or self._deadline.passed():
                finish.file.drop()
                error = self._too_late()
            else:
                finish.file.sync()
                finish.then()
        except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
            error = raised
        self._end(size_bytes, error)

    def _end(self, size_bytes: int, error: BaseException | None) -> None:
        with self._lock:
            self._ended += 1
            self._unwritten_bytes -= size_bytes
            self._error = self._error or error
            self._has_room.notify_all()
            if self._error is not None:
                self._has_unsynced.notify_all()

    def _drop_unsynced(self) -> None:
        with self._lock:
            dropped = list(self._unsynced)
            self._unsynced.clear()
        for _, finish in dropped:
            finish.file.drop()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._error is not None

    @property
    def _is_taken_over(self) -> bool:
        return self._idle_priority is not None and self._idle_priority.must_end()

    @property
    def _ends(self) -> bool:
        return self._stopped or self._is_taken_over

    def _take_buffer(self) -> Buffer:
        try:
            return self._buffers.pop()
        except IndexError:
            return Buffer()  # none was reserved, or a stuck thread of an earlier save has it

    def _next(self, wait: bool) -> tuple[int, Act] | None:
        """Returns the next call; None if the thread must end. Without ``wait``, None also if there is no call now."""
        with self._lock:
            if wait:
                self._deadline.wait_for(self._has_work, lambda: bool(self._waiting) or self._ends)
            if self._ends or not self._waiting:
                return None
            size_bytes, act = self._waiting.popleft()
            self._waiting_bytes -= size_bytes
            self._has_room.notify_all()
            return size_bytes, act

    def _put_back(self, size_bytes: int, act: Act) -> None:
        with self._lock:
            self._waiting.appendleft((size_bytes, act))
            self._waiting_bytes += size_bytes
            self._has_work.notify()

    def _may_wait(self, size_bytes: int) -> bool:
        if self._error is not None or self._added == self._ended:
            return True
        if self._limit_bytes is not None and self._unwritten_bytes + size_bytes > self._limit_bytes:
            return False
        fits = self._waiting_bytes + size_bytes <= _WAITING_BYTES
        return not self._waiting or (len(self._waiting) < _WAITING_FILES and fits)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _too_late(self) -> SaveFailed:
        return SaveFailed(
            f"only {self._ended} of {self._added} files were written to {self._folder} {self._deadline.ended}"
        )


def _write_nicely(write: Callable[[], None], niceness: int) -> None:
    machine.be_nice(niceness)
    write()


def _start(threads: list[threading.Thread], count: int, run: Callable[[], None], action: str) -> bool:
    """Starts ``count`` threads, and adds them to ``threads``. Returns False if the system does not allow all."""
    for number in range(count):
        thread = threading.Thread(target=run, name=f"gracepoint: {action} {number}", daemon=True)
        try:
            start_thread(thread)
        except NoThread as error:  # a limit on threads, or no memory for their stacks
            logger.warning("a save %s files in %d threads and not %d: %s", action, number, count, error)
            return False
        threads.append(thread)
    return True


class Folders:
    """The folders of one save. The thread that first needs a folder makes it."""

    def __init__(self, top: StoragePath, place: Place | None = None, *, direct: bool) -> None:
        """``direct`` is True if their file system has direct I/O. ``place``: see ``WriteJob``."""
        self._top = top
        self._place = place
        self._direct = direct
        self.made = {top, top.parent}  # the parent has the entry of the top folder

    def write(
        self,
        path: str,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        later: Later | None = None,
    ) -> StoredFile:
        """Writes one file at ``path`` below the save's folder. See ``StoragePath.write_large``."""
        if self._place is not None:
            checksum = checksum_of(data, buffer, go_on)
            self._place(path, data, checksum, go_on)
        else:
            where = self._top / path
            if where.parent not in self.made:
                where.parent.make_folder()
                self.made.update(where.folders_up_to(self._top))
            checksum = where.write_large(data, buffer, go_on, direct=self._direct, later=later)
        return StoredFile(len(data), checksum)
