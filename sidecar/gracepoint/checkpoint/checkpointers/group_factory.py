"""Creates process groups for checkpointers without a session, from the processes of any initialised JAX cluster.

Of the modules of ``checkpoint``, only this one uses the coordination service. All others use a ``ProcessGroup``.

Checkpointers are numbered in the order of their creation, separately for each set of processes. So the keys of
checkpointers that are alive at the same time differ, if every process creates those of one set in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import secrets
import threading
import weakref
from collections.abc import Collection

import jax
from jax._src import distributed

from gracepoint import machine
from gracepoint.errors import SettingsError
from gracepoint.multihost import JaxStore, StoreProcessGroup
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
        mine = f"local-{secrets.token_hex(4)}" if gang.process_index == 0 else None
        attempt = gang.broadcast(f"checkpointer/{self._number}/attempt", mine, timeout_s=timeout_s)
        job = machine.environment().get(Env.JOBSET_UID) or attempt
        self._joined = JoinedGroup(gang, attempt, processes or tuple(range(gang.process_count)), job)
        return self._joined

    def _gang_of(self, wanted: Collection[int]) -> tuple[ProcessGroup, tuple[int, ...]]:
        processes, here, count = tuple(wanted), jax.process_index(), jax.process_count()
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
