"""The key-value store that all processes share.

``JaxStore`` uses JAX's coordination service, which runs in process 0 whenever JAX runs on several processes.
``InMemoryStore`` is the store of one process, or of several threads that stand for processes in a test. Errors of JAX
are translated only in this module.

Costs of ``JaxStore``, measured with jax 0.10: a set or try_get takes 0.4-0.7 ms, and a blocked get returns 1-2 ms after
the set. **A get that times out leaks about 35 KB in the client and the service** until the service ends. So wait rarely
and with long timeouts, never in a tight loop. A counter must stay below 2**31: the service adds in 64 bits, but cannot
read a larger value again.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from gracepoint.errors import BarrierError, GracepointError


class KeyExists(GracepointError):
    """The key is set already. Keys are written once."""


class KeyTimeout(GracepointError, TimeoutError):
    """The key was not set in time."""


class StoreUnavailable(BarrierError, ConnectionError):
    """The store cannot be reached, or it refused the request for another reason."""


class KeyValueStore(Protocol):
    """A store of texts under keys, which are paths (``a/b/c``). Any thread may call any method."""

    def set(self, key: str, value: str) -> None:
        """Sets a key once.

        Raises:
            KeyExists: The key is set already. It was not changed.
        """

    def get(self, key: str, *, timeout_s: float) -> str:
        """Waits until the key is set. Returns its value.

        Raises:
            KeyTimeout: The key was not set within ``timeout_s``.
        """

    def try_get(self, key: str) -> str | None:
        """Returns the value. None if the key is not set."""

    def increment(self, key: str, by: int = 1) -> int:
        """Adds to a counter and returns its new value. Before the first call the counter is 0. It has 31 bits."""

    def list(self, folder: str) -> dict[str, str]:
        """Returns the values of all keys below ``folder/``, by key. The keys are relative to the folder."""

    def delete_folder(self, folder: str) -> None:
        """Removes ``folder`` and all keys below ``folder/``. JAX's store cannot remove a single key."""


class InMemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def set(self, key: str, value: str) -> None:
        with self._lock:
            if key in self._values:
                raise KeyExists(f"the key {key!r} is set already")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout_s: float) -> str:
        with self._lock:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise KeyTimeout(f"waited {timeout_s:g} s for the key {key!r}, which nobody set")
            return self._values[key]

    def try_get(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)

    def increment(self, key: str, by: int = 1) -> int:
        with self._lock:
            value = int(self._values.get(key, "0")) + by
            assert value < 1 << 31, f"the counter {key!r} would be {value}, which JAX's store could not read again"
            self._values[key] = str(value)
            return value

    def list(self, folder: str) -> dict[str, str]:
        with self._lock:
            return {k.removeprefix(f"{folder}/"): v for k, v in self._values.items() if k.startswith(f"{folder}/")}

    def delete_folder(self, folder: str) -> None:
        with self._lock:
            for key in [k for k in self._values if f"{k}/".startswith(f"{folder}/")]:
                del self._values[key]


class JaxStore:
    """The store of JAX's coordination service.

    Args:
        client: ``jaxlib``'s ``DistributedRuntimeClient`` of an initialised ``jax.distributed``.
        root: Prefix of every key, so that the keys do not collide with those of other code.
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

    def increment(self, key: str, by: int = 1) -> int:
        try:
            return int(self._client.key_value_increment(self._path(key), by))
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
    """Returns the status code with which every message of the service begins (one of absl's canonical names)."""
    return str(error).partition(":")[0]


def _translated(error: RuntimeError, what: str) -> GracepointError:
    if _code(error) == "ALREADY_EXISTS":
        return KeyExists(f"{what}: it is set already")
    if _code(error) == "DEADLINE_EXCEEDED":
        return KeyTimeout(f"{what}, which nobody set")
    return StoreUnavailable(f"{what}: {str(error).splitlines()[0]}")
