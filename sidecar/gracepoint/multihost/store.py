"""The key-value store that all processes share, and the names of its keys.

``JaxStore`` uses JAX's coordination service, which runs in process 0 whenever JAX runs on several processes.
``InMemoryStore`` is the store of one process, or of several threads that stand for processes in a test. Errors of JAX
are translated only in this module.

Costs of ``JaxStore``, measured with jax 0.10: a set or try_get takes 0.4-0.7 ms, and a blocked get returns 1-2 ms after
the set. **A get that times out leaks about 35 KB in the client and the service** until the service ends. So wait rarely
and with long timeouts, never in a tight loop. A counter must stay below 2**31: the service adds in 64 bits, but cannot
read a larger value again.

``BarrierKeys`` makes keys that are unique by construction: ``job-uid/attempt/epoch/phase/counter``. Every process
counts for itself. The counters agree as long as every process asks for the keys of a phase in the same order. So
threads that run at the same time must use different phases (``commit``, ``cleanup``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

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
            entries = self._client.key_value_dir_get(path)
        except RuntimeError as error:
            raise _translated(error, f"listing {folder!r}") from error
        return {key.removeprefix(path): value for key, value in entries}

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


def _translated(error: RuntimeError, action: str) -> GracepointError:
    if _code(error) == "ALREADY_EXISTS":
        return KeyExists(f"{action}: it is set already")
    if _code(error) == "DEADLINE_EXCEEDED":
        return KeyTimeout(f"{action}, which nobody set")
    return StoreUnavailable(f"{action}: {str(error).splitlines()[0]}")


class BarrierKeys:
    """Makes keys. Any thread may call any method.

    Args:
        job_uid: The JobSet's UID. Without a JobSet, another name of the job.
        attempt: Identifies the start of the job. It is the same in all processes.
    """

    def __init__(self, job_uid: str, attempt: str | int) -> None:
        self._root = f"{_part('job_uid', job_uid)}/{_part('attempt', attempt)}"
        self._counters: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()

    def next(self, phase: str, *, epoch: str | int = 0) -> str:
        """Returns the next key of a phase of an epoch.

        Raises:
            ValueError: A part is empty or contains a slash. Then two different keys could be equal.
        """
        folder = f"{self._root}/{_part('epoch', epoch)}/{_part('phase', phase)}"
        with self._lock:
            counter = self._counters.setdefault(folder, itertools.count())
            return f"{folder}/{next(counter)}"


def _part(name: str, value: str | int) -> str:
    text = str(value)
    if not text or "/" in text:
        raise ValueError(f"{name}: expected a text without a slash that is not empty, found {text!r}")
    return text


#: Names of pods by process index, for messages. None where a process has no pod, or its name is not known.
Pods: TypeAlias = Sequence[str | None]

#: How many processes a message names.
_AT_MOST = 10


def group_name(participants: Sequence[int], process_count: int) -> str:
    """Returns a short name of a sorted set of processes. Different sets have different names."""
    if len(participants) == process_count:
        return "all"
    return hashlib.sha256(json.dumps(list(participants)).encode()).hexdigest()[:12]


def pods_of(processes: Iterable[int], pods: Pods) -> list[str]:
    """Returns the names of the pods of some processes, of ten at most, without those that are not known."""
    names_there = (pods[index] for index in list(processes)[:_AT_MOST] if index < len(pods))
    return [name for name in names_there if name]


def named(processes: Iterable[int], names: Pods = ()) -> str:
    """Returns process indices as text, with their pods if known. Ten at most are named."""
    indices = list(processes)
    shown = ", ".join(f"{i} ({names[i]})" if i < len(names) and names[i] else str(i) for i in indices[:_AT_MOST])
    more = f" and {len(indices) - _AT_MOST} more" if len(indices) > _AT_MOST else ""
    return f"process{'es' if len(indices) != 1 else ''} {shown}{more}"
