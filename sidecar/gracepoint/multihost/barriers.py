"""Barriers, broadcasts and gathers of processes, on a key-value store.

The coordination service's own ``wait_at_barrier`` is not used: it cannot be interrupted when a peer fails, it breaks
both sides when an id is used again, and it runs nothing in the process that arrives last.

A barrier has these keys below its own: ``.arrived/<who>``, the tree of counters at which the processes arrive,
``.words/<block>/<rank>``, the values of a gather, and ``released``. The point keeps the first two apart from a caller's
key below this one. ``<who>`` identifies the set of processes that take part: processes that name different sets never
complete each other's barrier, and the error says so. ``released`` is written exactly once, by the process that decides
the barrier: the last to arrive (all pass), one that fails (its error), one that gives up (its timeout) or one that
cancels (its reason). All others wait for that key, so the service has one blocked request per process. A process that
loses the race to write the key does what the value says. So no process passes a barrier that another has left by
timeout, or the other way round. A broadcast has only the key ``released``, written by its source.

Passing a barrier takes two requests, and a gather or reduce three, whatever the number of processes: in the tree of
``Arrivals``, the last to arrive learns that it is last, and it alone reads the values of all. In a timeout, the first
processes read who is missing, and write it for the others.

A call blocks its thread at most until its timeout. Different threads may use different keys at the same time, and any
thread may call ``fail`` and ``cancel``. There are no threads here; a process's only state is what ``Waiting`` and
``StoreProcessGroup`` guard by their locks. The process that completes a barrier removes the keys of its arrivals.
``released`` stays until the caller knows that all processes have passed it (``retire``), or all have said so
(``leave``). A barrier that is repeated needs one of the two calls. Otherwise the store grows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gracepoint.errors import BarrierCancelled, BarrierFailed, BarrierReused, BarrierTimeout
from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore, group_name, named


def read_released(text: str) -> dict[str, Any]:
    """Reads the value of the key."""
    value: dict[str, Any] = json.loads(text)
    return value


def released_value(key: str, released: dict[str, Any], group: str, by: str) -> str:
    """Returns the result of a barrier.

    Args:
        key: The barrier's key.
        released: What was decided.
        group: The name of the set of processes that this process names.
        by: The process that decided, as text.

    Raises:
        BarrierFailed: A process failed, or the processes name different sets.
        BarrierCancelled: A process gave the barrier up.
        BarrierTimeout: Not all processes came in time. Names the missing ones.
    """
    if "error" in released:
        raise BarrierFailed(f"barrier {key!r}: {by} reported {released['error']}")
    if "cancelled" in released:
        raise BarrierCancelled(f"barrier {key!r}: {by} gave it up: {released['cancelled']}")
    if "missing" in released:
        raise BarrierTimeout(
            f"barrier {key!r}: {by} gave up after {released['timeout_s']:g} s, {released['why']}",
            tuple(released["missing"]),
        )
    if released["who"] != group:
        raise BarrierFailed(
            f"barrier {key!r}: {by} completed it with other processes than those that this one names: give "
            f"every process the same processes=, or a separate key for each group"
        )
    result: str = released["result"]
    return result


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """How arrivals are counted. All processes use the same.

    Attributes:
        bits: Size of a mark. A mark is a number from 1 to ``most``.
        fan_out: How many members a group has at most. ``bits * fan_out`` is at most 31.
        join: Returns one mark for several. The order and the grouping of the marks must not matter.
    """

    bits: int
    fan_out: int
    join: Callable[[Iterable[int]], int]

    @property
    def most(self) -> int:
        """The largest mark."""
        return (1 << self.bits) - 1

    def arrive(self, store: KeyValueStore, folder: str, rank: int, count: int, mark: int = 1) -> int | None:
        """Notes that a process has arrived. Each process calls it once for a folder.

        Args:
            store: The store that all processes share.
            folder: The folder of the counters. Nothing else is in it.
            rank: This process, 0 to ``count - 1``.
            count: How many processes arrive.
            mark: What this process has to say.

        Returns:
            The joined mark of all processes if this process was the last. None if others are missing.
        """
        level, width = 0, count
        while True:
            group, slot = divmod(rank, self.fan_out)
            counter = store.increment(f"{folder}/{level}/{group}", mark << slot * self.bits)
            marks = self._marks(counter, min(self.fan_out, width - group * self.fan_out))
            if not all(marks):
                return None
            mark = self.join(marks)
            if width <= self.fan_out:
                return mark
            level, width, rank = level + 1, -(-width // self.fan_out), group

    def marks(self, counters: Mapping[str, str], count: int) -> Sequence[int]:
        """Returns the marks of all processes by rank; 0 where one has not arrived.

        Args:
            counters: What the store lists in the folder.
            count: How many processes arrive.
        """
        absent: list[int] = []
        for group, start in enumerate(range(0, count, self.fan_out)):
            absent += self._marks(int(counters.get(f"0/{group}", "0")), min(self.fan_out, count - start))
        return absent

    def _marks(self, counter: int, members: int) -> Sequence[int]:
        return [counter >> slot * self.bits & self.most for slot in range(members)]


#: Arrivals that say nothing but that they have happened.
PLAIN = Arrivals(1, 31, max)


_ALL = "all"


def missing(store: KeyValueStore, key: str, group: str, participants: Sequence[int]) -> list[int]:
    """Returns which of the participants have not come to a barrier.

    Args:
        store: The store.
        key: The barrier's key.
        group: The name of the set of participants.
        participants: The processes that take part.
    """
    marks = PLAIN.marks(store.list(f"{key}/.arrived/{group}"), len(participants))
    return [process for process, mark in zip(participants, marks, strict=True) if not mark]


class Waiting:
    """At which barriers this process waits now, and for whom. Threads that wait enter themselves; any thread may ask.

    Args:
        store: The store of all processes.
        process_index: This process.
        process_count: How many processes there are.
    """

    def __init__(self, store: KeyValueStore, process_index: int, process_count: int) -> None:
        self._store = store
        self._process_index = process_index
        self._process_count = process_count
        self._awaited: dict[str, Callable[[], Sequence[int]]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at(self, key: str, awaited: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Notes that a thread waits within the block.

        Args:
            key: What it waits for.
            awaited: Returns the processes that have not come yet.
        """
        with self._lock:
            self._awaited[key] = awaited
        try:
            yield
        finally:
            with self._lock:
                del self._awaited[key]

    @contextlib.contextmanager
    def expecting(self, key: str) -> Iterator[None]:
        """Notes that this process has come to a point at which other code, such as JAX's, waits for all processes.

        Within the block this process waits for those that have not come to that point. Every process has such a block.

        Args:
            key: Unique, as for a barrier. The keys below it stay until the caller removes them.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        PLAIN.arrive(self._store, f"{key}/.arrived/{_ALL}", self._process_index, self._process_count)
        with self.at(key, lambda: missing(self._store, key, _ALL, range(self._process_count))):
            yield

    def awaited(self) -> list[int]:
        """Returns the processes for which any thread waits, sorted.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        with self._lock:
            questions = list(self._awaited.values())
        return sorted({process for ask in questions for process in ask()})


#: Seconds by rank: up to 8 processes are few enough to follow the first one quickly.
_STEPS = ((1, 0.0), (8, 0.1), (64, 0.2))
_MANY_S = 0.3
#: The others follow one after the other, so that most of them see what an earlier one has done.
_EACH_S = 0.00025


def after_s(rank: int) -> float:
    """Returns the seconds that a process waits before it does what any process could do for all now."""
    return next((wait_s for below, wait_s in _STEPS if rank < below), _MANY_S + _EACH_S * rank)


def polls(rank: int, look: int) -> bool:
    """Returns whether a process asks the store at one of its looks, which are numbered from 1.

    Process 0 asks at every look, process 1 at every fourth, process 2 at every ninth, and so on. All processes together
    ask less than twice as often as process 0 alone, however many they are.
    """
    return look % (rank + 1) ** 2 == 0


#: After so many turns, all processes that still wait look: several have hung, so what they look at is slow, or gone.
_TURNS = 3


def may_decide(
    store: KeyValueStore,
    key: str,
    process_index: int,
    release: Callable[[str, dict[str, Any]], dict[str, Any]],
    timeout_s: float,
) -> dict[str, Any] | None:
    """Returns what another process has decided at ``key``. None if it is this process's turn to look.

    Args:
        store: The store of all processes.
        key: Key of the decision.
        process_index: This process.
        release: Writes what is decided at a key, or returns what was decided before.
        timeout_s: Seconds that another process's turn may take.
    """
    for turn in range(_TURNS):
        decision = {"by": process_index}
        if release(f"{key}/turn/{turn}", decision) is decision:
            return None
        try:
            return read_released(store.get(f"{key}/released", timeout_s=timeout_s))
        except KeyTimeout:
            continue
    return None


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
            values: dict[int, str] = {}
            for block in range(-(-len(participants) // _BLOCK)):
                values |= {int(rank): text for rank, text in self._store.list(f"{key}/.words/{block}").items()}
            return merge([values[rank] for rank in range(len(participants))])

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
        group = group_name(participants, self._process_count)
        self._use_once(key)
        if source == self._process_index:
            if value is None:
                error = ValueError(f"broadcast of {key!r}: process {source} must give the value, found None")
                self.fail(key, error)
                raise error
            released = self._release(key, {"by": source, "who": group, "result": value})
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
        return released_value(key, released, group, self._named([released["by"]]))

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
        decision = {"by": self._process_index, "cancelled": reason + self._without(key)}
        return self._release(key, decision) is decision

    def _without(self, key: str) -> str:
        """Returns, as text, which processes have not come to a barrier of all processes. Empty if none waits there."""
        everybody = range(self._process_count)
        group = group_name(everybody, self._process_count)
        if self._groups_at(key) != {group}:
            return ""
        late = missing(self._store, key, group, everybody)
        return f", without {self._named(late)} of {self._process_count}" if late else ""

    def _groups_at(self, key: str) -> set[str]:
        return {name.partition("/")[0] for name in self._store.list(f"{key}/.arrived")}

    def _meet(
        self, key: str, value: str | None, timeout_s: float, participants: Sequence[int], complete: Callable[[], str]
    ) -> str:
        group = group_name(participants, self._process_count)
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
        if PLAIN.arrive(self._store, f"{key}/.arrived/{group}", rank, len(participants)) is not None:
            released = self._complete(key, group, complete)
        else:
            with self.waiting.at(key, lambda: missing(self._store, key, group, participants)):
                released = self._wait(key, group, rank, timeout_s, participants)
        result = released_value(key, released, group, self._named([released["by"]]))
        logger.info("process %d passed barrier %r after %.3f s", self._process_index, key, time.monotonic() - began_s)
        return result

    def _complete(self, key: str, group: str, complete: Callable[[], str]) -> dict[str, Any]:
        """Completes the barrier in the last process to arrive, unless it was decided otherwise meanwhile."""
        before = self._store.try_get(f"{key}/released")
        if before is not None:
            return read_released(before)
        try:
            released = self._release(key, {"by": self._process_index, "who": group, "result": complete()})
        except BaseException as error:
            self.fail(key, error)
            raise
        self._store.delete_folder(f"{key}/.arrived")
        self._store.delete_folder(f"{key}/.words")
        return released

    def _wait(self, key: str, group: str, rank: int, timeout_s: float, participants: Sequence[int]) -> dict[str, Any]:
        for wait_s in (timeout_s, after_s(rank)):
            with contextlib.suppress(KeyTimeout):
                return read_released(self._store.get(f"{key}/released", timeout_s=wait_s))
        late = missing(self._store, key, group, participants)
        if len(self._groups_at(key)) > 1:
            late, reason = [], "as the processes do not all name the same processes= to take part"
        elif late:
            reason = f"without {self._named(late)} of {len(participants)}"
        else:
            reason = "as the last was at work"
        decision = {"by": self._process_index, "timeout_s": timeout_s, "missing": late, "why": reason}
        return self._release(key, decision)

    def _release(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Decides the barrier, or returns what was decided before."""
        try:
            self._store.set(f"{key}/released", json.dumps(value))
        except KeyExists:
            return read_released(self._store.get(f"{key}/released", timeout_s=5))
        return value

    def check_participants(self, processes: Collection[int] | None) -> None:
        """Raises ValueError if ``processes`` has an index that does not exist, or lacks this process."""
        self._participants(processes)

    def _participants(self, processes: Collection[int] | None) -> Sequence[int]:
        """Returns the processes that take part, sorted."""
        if processes is None:
            return range(self._process_count)
        members = sorted(set(processes))
        if not members or members[0] < 0 or members[-1] >= self._process_count:
            raise ValueError(
                f"processes: expected at least one of the process indices 0 to {self._process_count - 1}, "
                f"found {members}"
            )
        if self._process_index not in members:
            raise ValueError(
                f"processes: expected this process, {self._process_index}, to be among those taking part, found "
                f"{members}: the others must not make the call"
            )
        return members

    def _use_once(self, key: str) -> None:
        with self._lock:
            if key in self._used:
                raise BarrierReused(f"the key {key!r} was used before; every barrier needs a separate key")
            self._used.add(key)

    def _forget(self, folder: str) -> None:
        with self._lock:
            self._used = {key for key in self._used if not f"{key}/".startswith(f"{folder}/")}

    def _named(self, processes: Iterable[int]) -> str:
        return named(processes, self._names)


def _to_runs(values: list[str]) -> str:
    return json.dumps([[value, len(list(run))] for value, run in itertools.groupby(values)])
