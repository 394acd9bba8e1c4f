"""A save's transfer callbacks that record what they are called with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gracepoint.checkpoint.options import Silent, TransferPriority


class Recorder:
    """A callback that takes a leaf's priority from its name's first letter, and writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
        return {
            "s": TransferPriority.SYNCHRONOUS,
            "p": TransferPriority.ASYNCHRONOUS_PRIORITIZED,
            "d": TransferPriority.ASYNCHRONOUS_DEPRIORITIZED,
        }[keypath[0].key[0]]

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        self._tell("transferred", keypath)

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        self._tell("written", keypath)

    def _tell(self, what: str, keypath: tuple[Any, ...]) -> None:
        with self._lock:
            self.events.append((what, keypath[0].key))

    def names(self, what: str) -> list[str]:
        return [name for event, name in self.events if event == what]


class AtWrites(Silent):
    """A callback that calls ``act`` whenever a leaf is written. What ``act`` raises fails the save of this process."""

    def __init__(self, act: Callable[[], object] | None = None) -> None:
        self.act = act

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        if self.act is not None:
            self.act()
