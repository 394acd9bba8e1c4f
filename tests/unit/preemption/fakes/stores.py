"""Stores of a process 0 that is not there."""

from __future__ import annotations

import threading

from gracepoint.multihost import InMemoryStore, StoreUnavailable


class Unreachable(InMemoryStore):
    """The store of a process 0 that has ended."""

    def set(self, key: str, value: str) -> None:
        raise StoreUnavailable("no answer")


class Silent(InMemoryStore):
    """The store of a process 0 that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.goes_on.wait(60)
