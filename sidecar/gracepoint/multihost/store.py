"""The one thing that all processes share before any checkpoint: a key-value store.

``JaxStore`` is JAX's coordination service, which lives in process 0 and is there wherever JAX runs on several
processes; ``InMemoryStore`` is the store of one process (or of several threads that play processes). Errors of
JAX are translated here and nowhere else.

Costs of the real one, measured with jax 0.10: a set or try_get 0.4-0.7 ms, a blocked get wakes 1-2 ms after the
set. **A get that times out leaves about 35 KB behind in client and service**, for as long as the service lives:
wait rarely and long, never in a tight loop.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from gracepoint.errors import BarrierError, GracepointError


class KeyExists(GracepointError):
    """The key was set before; keys are written once."""


class KeyTimeout(GracepointError, TimeoutError):
    """Nobody set the key in time."""


class StoreUnavailable(BarrierError, ConnectionError):
    """The store cannot be reached, or refused for a reason that is none of the above."""


class KeyValueStore(Protocol):
    """Keys are paths (``a/b/c``), values texts; every call may be made from any thread."""

    def set(self, key: str, value: str) -> None:
        """Sets a key once.

        Raises:
            KeyExists: It is set already; nothing was changed.
        """

    def get(self, key: str, *, timeout_s: float) -> str:
        """Waits until the key is set.

        Raises:
            KeyTimeout: It was not, in time.
        """

    def try_get(self, key: str) -> str | None:
        """The value, or None where the key is not set."""

    def increment(self, key: str) -> int:
        """Adds one to a counter (0 before the first call) and returns its new value."""

    def list(self, folder: str) -> dict[str, str]:
        """Keys below ``folder/`` with their values; keys are relative to it."""

    def delete_folder(self, folder: str) -> None:
        """Removes ``folder`` and all keys below ``folder/`` (JAX's store can do no less)."""


class InMemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self._values:
                raise KeyExists(f"the key {key!r} is set already")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout_s: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise KeyTimeout(f"waited {timeout_s:g} s for the key {key!r}, which nobody set")
            return self._values[key]

    def try_get(self, key: str) -> str | None:
        with self._changed:
            return self._values.get(key)

    def increment(self, key: str) -> int:
        with self._changed:
            value = int(self._values.get(key, "0")) + 1
            self._values[key] = str(value)
            return value

    def list(self, folder: str) -> dict[str, str]:
        with self._changed:
            return {k.removeprefix(f"{folder}/"): v for k, v in self._values.items() if k.startswith(f"{folder}/")}

    def delete_folder(self, folder: str) -> None:
        with self._changed:
            for key in [k for k in self._values if f"{k}/".startswith(f"{folder}/")]:
                del self._values[key]


class JaxStore:
    """JAX's coordination service, under ``root`` so that nobody else's keys are met.

    Args:
        client: ``jaxlib``'s ``DistributedRuntimeClient`` of an initialised ``jax.distributed``.
        root: Put in front of every key.
    """

    def __init__(self, client: Any, root: str) -> None:
        self._client = client
        self._root = root

    def set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(self._path(key), value)
        except RuntimeError as error:
            raise _translated(error, f"setting {key!r}") from error

    def get(self, key: str, *, timeout_s: float) -> str:
        started = time.monotonic()
        try:
            value: str = self._client.blocking_key_value_get(self._path(key), max(1, int(timeout_s * 1000)))
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            raise _translated(error, f"waited {waited_s:.1f} s for the key {key!r}") from error
        return value

    def try_get(self, key: str) -> str | None:
        try:
            value: str = self._client.key_value_try_get(self._path(key))
        except RuntimeError as error:
            if _code(error) == "NOT_FOUND":
                return None
            raise _translated(error, f"reading {key!r}") from error
        return value

    def increment(self, key: str) -> int:
        try:
            return int(self._client.key_value_increment(self._path(key), 1))
        except RuntimeError as error:
            raise _translated(error, f"incrementing {key!r}") from error

    def list(self, folder: str) -> dict[str, str]:
        path = self._path(folder) + "/"
        try:
            found = self._client.key_value_dir_get(path)
        except RuntimeError as error:
            raise _translated(error, f"listing {folder!r}") from error
        return {key.removeprefix(path): value for key, value in found}

    def delete_folder(self, folder: str) -> None:
        try:
            self._client.key_value_delete(self._path(folder) + "/")
        except RuntimeError as error:
            raise _translated(error, f"deleting {folder!r}") from error

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def _code(error: RuntimeError) -> str:
    """The status code with which every message of the service begins (absl's canonical names)."""
    return str(error).partition(":")[0]


def _translated(error: RuntimeError, what: str) -> GracepointError:
    if _code(error) == "ALREADY_EXISTS":
        return KeyExists(f"{what}: it is set already")
    if _code(error) == "DEADLINE_EXCEEDED":
        return KeyTimeout(f"{what}, which nobody set")
    return StoreUnavailable(f"{what}: {str(error).splitlines()[0]}")
