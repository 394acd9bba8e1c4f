"""Barriers, broadcasts and gathers of processes, on a key-value store.

The coordination service's own ``wait_at_barrier`` is not used: it cannot be interrupted when a peer fails, it breaks
both sides when an id is used again, and it runs nothing in the process that arrives last.

A barrier has these keys below its own: ``.arrived/<who>``, the tree of counters at which the processes arrive
(``arrivals``), ``.words/<block>/<rank>``, the values of a gather, and ``released``. The point keeps the first two apart
from a caller's key below this one. ``released`` is written exactly once, by the process that decides the barrier: the
last to arrive (all pass), one that fails (its error), one that gives up (its timeout) or one that cancels (its reason).
All others wait for that key, so the service has one blocked request per process. A process that loses the race to write
the key does what the value says. So no process passes a barrier that another has left by timeout, or the other way
round. A broadcast has only the key ``released``, written by its source.

Passing a barrier takes two requests, and a gather or reduce three, whatever the number of processes. Only the last to
arrive reads the values of all. In a timeout, the first processes read who is missing and tell the others.

``<who>`` identifies the set of processes that take part. Processes that name different sets never complete each other's
barrier, and the error says so.

A call blocks its thread at most until its timeout. Different threads may use different keys at the same time, and any
thread may call ``fail`` and ``cancel``. The process that completes a barrier removes the keys of its arrivals.
``released`` stays until the caller knows that all processes have passed it (``retire``), or all have said so
(``leave``). A barrier that is repeated needs one of the two calls. Otherwise the store grows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from gracepoint.errors import BarrierReused, BarrierTimeout
from gracepoint.multihost.coordination import rank_delays
from gracepoint.multihost.coordination.arrivals import PLAIN
from gracepoint.multihost.coordination.barrier_result import read_released, released_value
from gracepoint.multihost.coordination.decision import may_decide
from gracepoint.multihost.coordination.store import KeyExists, KeyTimeout, KeyValueStore
from gracepoint.multihost.coordination.waiting import Waiting, missing
from gracepoint.multihost.naming import group_name, named

logger = logging.getLogger(__name__)

#: How many values of a gather are read in one request. The answer then has a moderate size.
_BLOCK = 512


class StoreProcessGroup:
    """``gracepoint.process_group.ProcessGroup`` on a store.

    Args:
        store: The key-value store of all processes of the attempt, and of no other attempt.
        process_index: This process, 0 to ``process_count - 1``.
        process_count: How many processes there are.
        names: Pod names by process index, for messages. None where a process has no pod.
    """

    def __init__(
        self, store: KeyValueStore, process_index: int, process_count: int, *, names: Sequence[str | None] = ()
    ) -> None:
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index: expected 0 to {process_count - 1}, found {process_index}")
        self._store = store
        self._process_index = process_index
        self._process_count = process_count
        self._names = names
        self._used: set[str] = set()
        self._lock = threading.Lock()
        #: For whom this process waits.
        self.waiting = Waiting(store, process_index, process_count)
        self.awaited = self.waiting.awaited

    @property
    def process_index(self) -> int:
        return self._process_index

    @property
    def process_count(self) -> int:
        return self._process_count

    def barrier(
        self,
        key: str,
        *,
        timeout_s: float,
        on_last: Callable[[], None] | None = None,
        processes: Collection[int] | None = None,
    ) -> None:
        """As ``ProcessGroup.barrier``."""

        def complete() -> str:
            if on_last is not None:
                on_last()
            return ""

        self._meet(key, None, timeout_s, self._participants(processes), complete)

    def reduce(
        self,
        key: str,
        value: str,
        merge: Callable[[list[str]], str],
        *,
        timeout_s: float,
        processes: Collection[int] | None = None,
    ) -> str:
        """As ``ProcessGroup.reduce``."""
        participants = self._participants(processes)

        def complete() -> str:
            words: dict[int, str] = {}
            for block in range(-(-len(participants) // _BLOCK)):
                words |= {int(rank): word for rank, word in self._store.list(f"{key}/.words/{block}").items()}
            return merge([words[rank] for rank in range(len(participants))])

        return self._meet(key, value, timeout_s, participants, complete)

    def gather(self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None) -> list[str]:
        """As ``ProcessGroup.gather``. Equal values of neighbours are sent once."""
        runs = json.loads(self.reduce(key, value, _to_runs, timeout_s=timeout_s, processes=processes))
        return [value for value, times in runs for _ in range(times)]

    def broadcast(
        self,
        key: str,
        value: str | None,
        *,
        timeout_s: float,
        source: int = 0,
        processes: Collection[int] | None = None,
    ) -> str:
        """As ``ProcessGroup.broadcast``."""
        participants = self._participants(processes)
        if source not in participants:
            raise ValueError(f"broadcast {key!r}: expected a source among the processes taking part, found {source}")
        who = group_name(participants, self._process_count)
        self._use_once(key)
        if source == self._process_index:
            if value is None:
                error = ValueError(f"broadcast of {key!r}: process {source} must give the value, found None")
                self.fail(key, error)
                raise error
            released = self._release(key, {"by": source, "who": who, "result": value})
        else:
            try:
                with self.waiting.at(key, lambda: [source]):
                    released = read_released(self._store.get(f"{key}/released", timeout_s=timeout_s))
            except BaseException as error:
                with self._lock:
                    self._used.discard(key)  # nobody knows that this process was here, so it may wait again
                if not isinstance(error, KeyTimeout):
                    raise
                raise BarrierTimeout(
                    f"broadcast {key!r}: {self._named([source])} published nothing within {timeout_s:g} s", (source,)
                ) from error
        return released_value(key, released, who, self._named([released["by"]]))

    def decide(self, key: str, value: str) -> str:
        """As ``ProcessGroup.decide``."""
        decided: str = self._release(key, {"by": self._process_index, "result": value})["result"]
        return decided

    def decide_in_turn(self, key: str, find: Callable[[], str], *, timeout_s: float) -> str:
        """As ``ProcessGroup.decide_in_turn``."""
        decided = may_decide(self._store, key, self._process_index, self._release, timeout_s)
        return self.decide(key, find()) if decided is None else str(decided["result"])

    def leave(self, folder: str, *, processes: Collection[int] | None = None) -> None:
        """As ``ProcessGroup.leave``."""
        participants = self._participants(processes)  # before the count: a wrong call must not count
        self._forget(folder)
        if self._store.increment(f"{folder}/left") == len(participants):
            self._store.delete_folder(folder)

    def retire(self, folder: str) -> None:
        """As ``ProcessGroup.retire``."""
        self._forget(folder)
        if self._process_index == 0:
            self._store.delete_folder(folder)

    def fail(self, key: str, error: BaseException) -> None:
        """As ``ProcessGroup.fail``. Has no effect once the barrier is released, as no process waits then."""
        self._release(key, {"by": self._process_index, "error": f"{type(error).__name__}: {error}"})

    def cancel(self, key: str, reason: str) -> bool:
        """As ``ProcessGroup.cancel``."""
        mine = {"by": self._process_index, "cancelled": reason + self._without(key)}
        return self._release(key, mine) is mine

    def _without(self, key: str) -> str:
        """Returns, in words, which processes have not come to a barrier of all processes. Empty if none waits there."""
        everybody = range(self._process_count)
        who = group_name(everybody, self._process_count)
        if self._groups_at(key) != {who}:
            return ""
        late = missing(self._store, key, who, everybody)
        return f", without {self._named(late)} of {self._process_count}" if late else ""

    def _groups_at(self, key: str) -> set[str]:
        return {name.partition("/")[0] for name in self._store.list(f"{key}/.arrived")}

    def _meet(
        self, key: str, value: str | None, timeout_s: float, participants: Sequence[int], complete: Callable[[], str]
    ) -> str:
        who = group_name(participants, self._process_count)
        rank = participants.index(self._process_index)
        self._use_once(key)
        began_s = time.monotonic()
        logger.info(
            "process %d is at barrier %r, of %d processes, for %g s at most",
            self._process_index,
            key,
            len(participants),
            timeout_s,
        )
        if value is not None:
            self._store.set(f"{key}/.words/{rank // _BLOCK}/{rank}", value)
        if PLAIN.arrive(self._store, f"{key}/.arrived/{who}", rank, len(participants)) is not None:
            released = self._complete(key, who, complete)
        else:
            with self.waiting.at(key, lambda: missing(self._store, key, who, participants)):
                released = self._wait(key, who, rank, timeout_s, participants)
        result = released_value(key, released, who, self._named([released["by"]]))
        logger.info("process %d passed barrier %r after %.3f s", self._process_index, key, time.monotonic() - began_s)
        return result

    def _complete(self, key: str, who: str, complete: Callable[[], str]) -> dict[str, Any]:
        """Completes the barrier in the last process to arrive, unless it was decided otherwise meanwhile."""
        before = self._store.try_get(f"{key}/released")
        if before is not None:
            return read_released(before)
        try:
            released = self._release(key, {"by": self._process_index, "who": who, "result": complete()})
        except BaseException as error:
            self.fail(key, error)
            raise
        self._store.delete_folder(f"{key}/.arrived")
        self._store.delete_folder(f"{key}/.words")
        return released

    def _wait(self, key: str, who: str, rank: int, timeout_s: float, participants: Sequence[int]) -> dict[str, Any]:
        for wait_s in (timeout_s, rank_delays.after_s(rank)):
            with contextlib.suppress(KeyTimeout):
                return read_released(self._store.get(f"{key}/released", timeout_s=wait_s))
        late = missing(self._store, key, who, participants)
        if len(self._groups_at(key)) > 1:
            late, why = [], "as the processes do not all name the same processes= to take part"
        elif late:
            why = f"without {self._named(late)} of {len(participants)}"
        else:
            why = "as the last was at work"
        mine = {"by": self._process_index, "timeout_s": timeout_s, "missing": late, "why": why}
        return self._release(key, mine)

    def _release(self, key: str, what: dict[str, Any]) -> dict[str, Any]:
        """Decides the barrier, or returns what was decided before."""
        try:
            self._store.set(f"{key}/released", json.dumps(what))
        except KeyExists:
            return read_released(self._store.get(f"{key}/released", timeout_s=5))
        return what

    def check_participants(self, processes: Collection[int] | None) -> None:
        """Raises ValueError if ``processes`` has an index that does not exist, or lacks this process."""
        self._participants(processes)

    def _participants(self, processes: Collection[int] | None) -> Sequence[int]:
        """Returns the processes that take part, sorted."""
        if processes is None:
            return range(self._process_count)
        found = sorted(set(processes))
        if not found or found[0] < 0 or found[-1] >= self._process_count:
            raise ValueError(
                f"processes: expected at least one of the process indices 0 to {self._process_count - 1}, found {found}"
            )
        if self._process_index not in found:
            raise ValueError(
                f"processes: expected this process, {self._process_index}, to be among those taking part, found "
                f"{found}: the others must not make the call"
            )
        return found

    def _use_once(self, key: str) -> None:
        with self._lock:
            if key in self._used:
                raise BarrierReused(f"the key {key!r} was used before; every barrier needs a key of its own")
            self._used.add(key)

    def _forget(self, folder: str) -> None:
        with self._lock:
            self._used = {key for key in self._used if not f"{key}/".startswith(f"{folder}/")}

    def _named(self, processes: Iterable[int]) -> str:
        return named(processes, self._names)


def _to_runs(values: list[str]) -> str:
    return json.dumps([[value, len(list(run))] for value, run in itertools.groupby(values)])
