"""What checkpointers without a session need of other processes: a process group, barriers, callbacks, and an end.

``GroupFactory`` creates process groups from the processes of any initialised JAX cluster. Of the modules of
``checkpoint``, only this one uses the coordination service. All others use a ``ProcessGroup``. Checkpointers are
numbered in the order of their creation, separately for each set of processes. So the keys of checkpointers that are
alive at the same time differ, if every process creates those of one set in the same order.

``SyncFnBarrier`` commits a save with a barrier that the caller passed in; such a barrier neither knows which process
comes last nor learns of failures. ``call_back`` calls the user's callback after the commit, before the save counts as
finished in any process. ``AtExit`` waits for a save in progress when the interpreter ends; otherwise its thread would
be killed without a message. There are no threads here.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import hashlib
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

import jax
from jax._src import distributed

from gracepoint import machine
from gracepoint.errors import BarrierError, GracepointError, SaveFailed, SettingsError
from gracepoint.multihost import JaxStore, StoreProcessGroup
from gracepoint.multihost.utilities import BarrierSyncFn
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.wire.names import Env

_lock = threading.Lock()  # protects the counters
# How many factories were made for each set of processes (None: all), and for each existing group.
_made: collections.Counter[tuple[int, ...] | None] = collections.Counter()
_made_in: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class JoinedGroup:
    """Processes that save together.

    Attributes:
        gang: The processes, by rank.
        attempt: Unique to this group; the same in all its processes.
        processes: ``jax.process_index()`` of each rank.
        job: The same in all attempts of a job. If the job is not known, this is ``attempt``.
    """

    gang: ProcessGroup
    attempt: str
    processes: tuple[int, ...]
    job: str

    def rank(self, process: int) -> int:
        """Returns the rank of a process by its ``jax.process_index()``.

        Raises:
            SettingsError: It is not one of these processes.
        """
        if process not in self.processes:
            raise SettingsError(
                f"primary_host is process {process}; expected one of those that save, {_shown(self.processes)}"
            )
        return self.processes.index(process)


class GroupFactory:
    """Brings processes together when they are first needed. Every process creates its factories in the same order.

    Args:
        active_processes: ``jax.process_index()`` of the processes that save. None: all processes.
        gang: An existing group. None: a group is created from ``active_processes``.
    """

    def __init__(self, active_processes: Collection[int] | None = None, gang: ProcessGroup | None = None) -> None:
        if gang is not None and active_processes is not None:
            raise SettingsError("expected active_processes or gang, found both")
        self._processes = None if active_processes is None else tuple(sorted(set(active_processes)))
        self._gang = gang
        self._joined: JoinedGroup | None = None
        with _lock:
            if gang is None:
                self._number = _made[self._processes]
                _made[self._processes] += 1
            else:
                self._number = _made_in.get(gang, 0)
                _made_in[gang] = self._number + 1

    def join(self, *, timeout_s: float) -> JoinedGroup:
        """Brings the processes together. Collective. Initialises JAX's backend. Later calls return the same group.

        Raises:
            SettingsError: This process does not take part, or there is no coordination service.
            BarrierTimeout: Process 0 did not arrive in time. The process may call again.
        """
        if self._joined is not None:
            return self._joined
        gang, processes = self._gang, self._processes
        if gang is None:
            gang, processes = self._gang_of(range(jax.process_count()) if processes is None else processes)
        name = f"local-{secrets.token_hex(4)}" if gang.process_index == 0 else None
        attempt = gang.broadcast(f"checkpointer/{self._number}/attempt", name, timeout_s=timeout_s)
        job = machine.environment().get(Env.JOBSET_UID) or attempt
        self._joined = JoinedGroup(gang, attempt, processes or tuple(range(gang.process_count)), job)
        return self._joined

    def _gang_of(self, members: Collection[int]) -> tuple[ProcessGroup, tuple[int, ...]]:
        processes, here, count = tuple(members), jax.process_index(), jax.process_count()
        if here not in processes or not 0 <= processes[0] <= processes[-1] < count:
            raise SettingsError(
                f"active_processes: expected some of the process indices 0 to {count - 1} with {here}, which is this "
                f"process, among them, found {_shown(processes)}: the others must not make the call"
            )
        if len(processes) == 1:
            return SingleProcess(), processes
        client = distributed.global_state.client
        if client is None:
            raise SettingsError(
                f"jax.process_count() is {count}, but there is no coordination service to meet at: call "
                f"jax.distributed.initialize() at the start of the program, or gracepoint.attach()"
            )
        root = f"gracepoint/checkpointers/{hashlib.sha256(repr(processes).encode()).hexdigest()[:12]}"
        names = [f"jax.process_index() {process}" for process in processes] if len(processes) < count else ()
        gang = StoreProcessGroup(JaxStore(client, root), processes.index(here), len(processes), names=names)
        return gang, processes


def _shown(processes: Collection[int]) -> str:
    return ", ".join(map(str, processes)) or "none"


logger = logging.getLogger(__name__)


class SyncFnBarrier:
    """A ``saving.operation.Barrier`` that uses a ``BarrierSyncFn``.

    All processes meet when they have written. One process commits. All processes meet again after the commit.

    Args:
        sync_fn: The barrier. Called twice in each save, with different keys.
        commits_here: Whether this process commits. True in exactly one process.
    """

    def __init__(self, sync_fn: BarrierSyncFn, *, commits_here: bool) -> None:
        self._sync_fn = sync_fn
        self._commits_here = commits_here

    def __call__(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """See ``saving.operation.Barrier``. Each of the two calls of the barrier has the whole timeout."""
        timeout_ms = max(1, int(timeout_s * 1000))
        try:
            self._wait(f"{key}/write_complete", timeout_ms)
            if self._commits_here:
                on_last()
            self._wait(f"{key}/commit_complete", timeout_ms)
        except SaveFailed:
            raise
        except Exception as error:
            raise BarrierError(f"barrier_sync_fn for {key!r}: {type(error).__name__}: {error}") from error

    def _wait(self, key: str, timeout_ms: int) -> None:
        logger.info("at barrier %r of barrier_sync_fn, for %g s at most", key, timeout_ms / 1000)
        self._sync_fn(key=key, timeout_ms=timeout_ms)
        logger.info("passed barrier %r of barrier_sync_fn", key)


def call_back(callback: Callable[[], None] | None, *, gang: ProcessGroup, key: str, timeout_s: float) -> None:
    """Calls ``callback``, and returns when it has returned in all processes that have one. Collective.

    Args:
        callback: The function to call. None if only other processes call it.
        gang: The processes that save together.
        key: Key of the barrier at which they meet.
        timeout_s: Seconds to wait at the barrier.

    Raises:
        SaveFailed: The callback failed in this process.
        BarrierError: The callback failed in another process, or did not return in time.
    """
    if callback is not None:
        try:
            callback()
        except BaseException as error:  # also SystemExit: the other processes wait
            gang.fail(key, error)
            raise SaveFailed(f"the checkpoint is committed, but post_finalization_callback failed: {error}") from error
    gang.barrier(key, timeout_s=timeout_s)


class Closable(Protocol):
    """An object that ``AtExit`` closes."""

    def close(self) -> None:
        """Waits for the save in progress. In a forked child, which inherits the call, it does nothing."""


class AtExit:
    """Closes ``what`` when the interpreter ends, unless it no longer exists or ``forget`` was called."""

    def __init__(self, closable: Closable) -> None:
        self._what = weakref.ref(closable)
        atexit.register(self._close)

    def forget(self) -> None:
        """Cancels the call at the end of the interpreter."""
        atexit.unregister(self._close)

    def _close(self) -> None:
        closable = self._what()
        if closable is None:
            return
        try:
            closable.close()
        except GracepointError as error:
            logger.error("the last save failed: %s", error)
