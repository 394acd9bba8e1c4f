"""Gangs whose processes are threads of the test, on one in-memory store."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from gracepoint.multihost import InMemoryStore, KeyValueStore, StoreProcessGroup

T = TypeVar("T")


def gangs(count: int, store: KeyValueStore | None = None) -> list[StoreProcessGroup]:
    """One ``StoreProcessGroup`` for each process."""
    shared = store or InMemoryStore()
    return [StoreProcessGroup(shared, index, count) for index in range(count)]


def together(*calls: Callable[[], T], timeout_s: float = 30) -> list[T | BaseException]:
    """Runs the calls at the same time; returns what each returned or raised."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [f.exception(timeout_s) or f.result() for f in futures]
