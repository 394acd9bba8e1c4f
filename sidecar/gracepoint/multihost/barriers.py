"""Bringing processes together on a key-value store: barriers, broadcast, gather.

Why not the coordination service's own ``wait_at_barrier``: it cannot be interrupted when a peer fails, breaks
both sides when an id is used again, and runs nothing in the last one to arrive.

A barrier is four kinds of keys below its own: ``arrived/<process>`` (so that a timeout can name who is missing),
``count``, and ``released``, written exactly once by whoever decides: the last to arrive (empty: come through),
a process that fails (its error) or one that gives up (its timeout). All others wait on that one key, so the
service carries a single parked request a process; whoever loses the race to write it obeys what stands there.
So nobody passes a barrier that another has left by timeout, and the other way round.

The calls block the thread that makes them, bounded by their timeout; different keys may be used in different
threads at the same time. The process that completes a barrier removes its arrivals; ``released`` stays, one
small key per barrier and attempt.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.errors import BarrierFailed, BarrierReused, BarrierTimeout
from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore


class StoreGang:
    """``gracepoint.gang.Gang`` on a store.

    Args:
        store: Shared by all processes of the attempt, and by no other attempt.
        process_index: This process, 0 to ``process_count - 1``.
        process_count: How many there are.
    """

    def __init__(self, store: KeyValueStore, process_index: int, process_count: int) -> None:
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index: expected 0 to {process_count - 1}, found {process_index}")
        self._store = store
        self._process_index = process_index
        self._process_count = process_count
        self._used: set[str] = set()
        self._lock = threading.Lock()

    @property
    def process_index(self) -> int:
        return self._process_index

    @property
    def process_count(self) -> int:
        return self._process_count

    def barrier(self, key: str, *, timeout_s: float, on_last: Callable[[], None] | None = None) -> None:
        """As ``Gang.barrier``."""

        def complete() -> str:
            if on_last is not None:
                on_last()
            return ""

        self._meet(key, "", timeout_s, complete)

    def gather(self, key: str, value: str, *, timeout_s: float) -> list[str]:
        """As ``Gang.gather``; the last to arrive reads all values once and hands them to the others."""

        def complete() -> str:
            arrived = self._store.list(f"{key}/arrived")
            return json.dumps([arrived[str(i)] for i in range(self._process_count)])

        values: list[str] = json.loads(self._meet(key, value, timeout_s, complete))
        return values

    def broadcast(self, key: str, value: str | None, *, timeout_s: float) -> str:
        """As ``Gang.broadcast``."""
        self._use_once(key)
        if self._process_index == 0:
            if value is None:
                raise ValueError(f"broadcast of {key!r}: process 0 must give the value, found None")
            self._store.set(f"{key}/value", value)
            return value
        try:
            return self._store.get(f"{key}/value", timeout_s=timeout_s)
        except KeyTimeout as error:
            raise BarrierTimeout(
                f"broadcast {key!r}: process 0 published nothing within {timeout_s:g} s", missing=(0,)
            ) from error

    def fail(self, key: str, error: BaseException) -> None:
        """As ``Gang.fail``. Too late where the barrier has been released: then nobody waits any more."""
        self._release(key, {"by": self._process_index, "error": f"{type(error).__name__}: {error}"})

    def _meet(self, key: str, value: str, timeout_s: float, complete: Callable[[], str]) -> str:
        self._use_once(key)
        self._store.set(f"{key}/arrived/{self._process_index}", value)
        if self._store.increment(f"{key}/count") == self._process_count:
            released = self._complete(key, complete)
        else:
            released = self._wait(key, timeout_s)
        if "error" in released:
            raise BarrierFailed(f"barrier {key!r}: process {released['by']} reported {released['error']}")
        if "missing" in released:
            missing = tuple(released["missing"])
            raise BarrierTimeout(
                f"barrier {key!r}: process {released['by']} gave up after {released['timeout_s']:g} s, "
                + (f"without {named(missing)} of {self._process_count}" if missing else "as the last was at work"),
                missing,
            )
        result: str = released["result"]
        return result

    def _complete(self, key: str, complete: Callable[[], str]) -> dict[str, Any]:
        """What the last to arrive does. If somebody has given up or failed by now, nothing is completed."""
        before = self._store.try_get(f"{key}/released")
        if before is not None:
            return _read(before)
        try:
            released = self._release(key, {"by": self._process_index, "result": complete()})
        except BaseException as error:
            self.fail(key, error)
            raise
        self._store.delete_folder(f"{key}/arrived")
        return released

    def _wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        try:
            return _read(self._store.get(f"{key}/released", timeout_s=timeout_s))
        except KeyTimeout:
            here = {int(i) for i in self._store.list(f"{key}/arrived")}
            missing = [i for i in range(self._process_count) if i not in here]
            return self._release(key, {"by": self._process_index, "missing": missing, "timeout_s": timeout_s})

    def _release(self, key: str, what: dict[str, Any]) -> dict[str, Any]:
        """Decides the barrier, or returns how it was decided before."""
        try:
            self._store.set(f"{key}/released", json.dumps(what))
        except KeyExists:
            return _read(self._store.get(f"{key}/released", timeout_s=5))
        return what

    def _use_once(self, key: str) -> None:
        with self._lock:
            if key in self._used:
                raise BarrierReused(f"the key {key!r} was used before; every barrier needs a key of its own")
            self._used.add(key)


def _read(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def named(processes: Sequence[int], at_most: int = 10) -> str:
    """Process indices in words, cut off where they are many."""
    names = ", ".join(str(i) for i in processes[:at_most])
    more = f" and {len(processes) - at_most} more" if len(processes) > at_most else ""
    return f"process{'es' if len(processes) != 1 else ''} {names}{more}"
