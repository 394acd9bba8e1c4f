"""The names of the processes. Every process can look up the names of any other, and reads only those that it needs.

When the processes meet, the last to arrive writes the names of all to the store, in blocks. A process reads a block
when a name in it is needed, for example for an error that names a missing process. From the start, all know the names
of the process that hosts the store: they are needed if the store does not answer.

The names of the blocks that were read are kept. Any thread may read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any, overload

from gracepoint.errors import AgreementError, GracepointError
from gracepoint.multihost.coordination.store import KeyValueStore
from gracepoint.process_group import ProcessGroup

log = logging.getLogger(__name__)

_BLOCK = 256
_READ_S = 5.0


@dataclasses.dataclass(frozen=True)
class ProcessNames:
    """The names of one process."""

    process_index: int  # jax.process_index()
    service_id: int  # id in JAX's coordination service; process 0 hosts the service
    pod_name: str | None  # None outside a pod


class Members(Sequence[ProcessNames]):
    """The processes by ``process_index``.

    Reading any but the host raises ``StoreUnavailable`` if the store cannot be reached, and ``KeyTimeout`` if it does
    not answer in time.

    Args:
        store: Has the names.
        count: How many processes there are.
        host: The names of the process that hosts the store. None: they are read from it, too.
    """

    def __init__(self, store: KeyValueStore, count: int, host: ProcessNames | None = None) -> None:
        self._store = store
        self._count = count
        self._host = host
        self._blocks: dict[int, list[ProcessNames]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ProcessNames: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ProcessNames]: ...

    def __getitem__(self, index: int | slice) -> ProcessNames | Sequence[ProcessNames]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        number = range(self._count)[index]
        if self._host is not None and number == self._host.process_index:
            return self._host
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            found = json.loads(self._store.get(f"names/{block}", timeout_s=_READ_S))
            self._blocks[block] = [ProcessNames(*names) for names in found]
        return self._blocks[block][place]


class PodNames(Sequence[str | None]):
    """The pod names of some members, for messages. None where a process has no pod, or its name cannot be read."""

    def __init__(self, members: Sequence[ProcessNames]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._members[index].pod_name
        except GracepointError as error:
            log.info("the name of a process cannot be read process=%d error=%s", index, error)
            return None


@dataclasses.dataclass(frozen=True)
class Introduced:
    """What all processes learn when they meet.

    Attributes:
        nonce: The nonce of the process with id 0 in the coordination service.
        members: The processes.
        host: The process that hosts the store: the one with id 0 in the coordination service. Its ``process_index`` may
            be another number.
        miscounted: An injected number of processes that is not the real one. None if all are right.
        last_started_unix_s: When the last of them was started, in seconds since the epoch, by its machine's clock. None
            if a process does not know when it was started.
    """

    nonce: str
    members: Members
    host: ProcessNames
    miscounted: int | None
    last_started_unix_s: float | None


def introduce(
    me: ProcessNames,
    injected: int | None,
    nonce: str,
    *,
    started_unix_s: float | None = None,
    gang: ProcessGroup,
    store: KeyValueStore,
    timeout_s: float,
) -> Introduced:
    """Brings the processes together once and exchanges their names, and when they were started. Collective.

    Args:
        me: This process.
        injected: The number of processes that was injected into this process. None if none was.
        nonce: A random text. Only that of the process with id 0 in the coordination service counts.
        started_unix_s: When this process was started, in seconds since the epoch. None: it is not known.
        gang: The processes, by their ids in the coordination service.
        store: Takes the names.
        timeout_s: Seconds to wait for the others.

    Raises:
        AgreementError: The process indices are not 0 to N-1. Raised in all processes.
        BarrierTimeout: A process did not arrive in time.
    """
    count = gang.process_count

    def merge(words: list[str]) -> str:
        said = [json.loads(word) for word in words]
        members = sorted((names for names, _, _, _ in said), key=lambda names: names[0])
        indices = [names[0] for names in members]
        if indices != list(range(count)):
            return json.dumps({"wrong": f"expected the process indices 0 to {count - 1} once each, found {indices}"})
        for start in range(0, count, _BLOCK):
            store.set(f"names/{start // _BLOCK}", json.dumps(members[start : start + _BLOCK]))
        wrong = next((injected for _, injected, _, _ in said if injected is not None and injected != count), None)
        starts = [start for _, _, _, start in said]
        last_start = None if None in starts else max(starts)
        return json.dumps({"nonce": said[0][2], "miscounted": wrong, "last_start": last_start, "host": said[0][0]})

    mine = json.dumps([dataclasses.astuple(me), injected, nonce, started_unix_s])
    found = json.loads(gang.reduce("members", mine, merge, timeout_s=timeout_s))
    if "wrong" in found:
        raise AgreementError(found["wrong"])
    host = ProcessNames(*found["host"])
    return Introduced(found["nonce"], Members(store, count, host), host, found["miscounted"], found["last_start"])
