"""Checkpoints in an object store. There are no directories, renames, links or locks; there are conditional requests.

A write is visible and durable as a whole when its reply has arrived. If the reply is lost, the request is made again.
The store may then answer that the condition does not hold, as the first request has changed the object. So each write
leaves a separate note with the object, and a write whose condition failed reads the object's note. If that is its own
note, the write has succeeded.

A folder is a prefix of names, so making a folder does nothing, and an empty folder does not exist. ``publish`` and
``make_folder(exclusive=True)`` are not available: steps are committed by a manifest (``steps.manifest_commit``).

Keys are the names of objects in the bucket. ``open_bucket`` opens buckets by their URI's scheme: one bucket with one
set of settings is one back end, for the whole process. ``check`` looks at the start of a job whether a store does what
checkpoints rely on. There are no threads here but those of ``persistence`` and ``requests``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gracepoint.checkpoint.memory import ArrayBytes, crc32
from gracepoint.checkpoint.storage import backend, posix
from gracepoint.checkpoint.storage.backend import Child, Entry, Generation, Noted, StaleGeneration, Value
from gracepoint.checkpoint.storage.direct_io import Buffer, Later, checksum_of
from gracepoint.checkpoint.storage.objects import gcs, requests
from gracepoint.checkpoint.storage.objects.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.http import ArrayBody, Body, Bytes, Exchange
from gracepoint.checkpoint.storage.objects.persistence import PATIENCE_S, Persistence
from gracepoint.checkpoint.storage.objects.provider import ABSENT, ConditionFailed, Found, GoOn, ObjectApi
from gracepoint.checkpoint.storage.objects.requests import ObjectReader
from gracepoint.checkpoint.storage.objects.s3 import S3Api

logger = logging.getLogger(__name__)

#: Seconds that the deletion of the object may take, and TensorStore's read of it.
_CLEANUP_S = 10.0


def check(store: ObjectBackend, key: str) -> None:
    """Creates, reads, lists, replaces and deletes an object below ``key``, also with conditions that do not hold.

    Without conditions on deletions, a store is used with a warning.

    Raises:
        OSError: A request failed, or the store ignores a condition of a write. The message says which one.
    """
    probe = f"{key}/" * bool(key) + f".gracepoint-probe.{secrets.token_hex(8)}"
    try:
        created = store.create(probe, b"probe")
        if store.read(probe).data != b"probe":
            raise OSError(errno.EIO, f"{store.url(probe)}: was read with other contents than it was written with")
        store.tensorstore_error = _why_tensorstore_cannot_read(store, probe)
        if store.tensorstore_error is not None:
            logger.warning(
                "%s: %s. Saves in OCDBT or with compression are refused, and what is stored so cannot be restored",
                store.url(key),
                store.tensorstore_error,
            )
        if not store.is_folder(key):
            raise OSError(errno.EIO, f"{store.url(key)}: the store lists no object there, though one was just written")
        with contextlib.suppress(FileExistsError):
            store.create(probe, b"other")
            raise _ignored(store, key, "the condition that an object must not exist")
        replaced = store.replace(probe, b"replaced", created)
        with contextlib.suppress(StaleGeneration):
            store.replace(probe, b"late", created)
            raise _ignored(store, key, "which version of an object a write may replace")
        store.delete_version(probe, created)
        stored = store.found(probe)
        if stored is None or stored.generation != replaced:
            logger.warning(
                "%s: the store ignores which version of an object a deletion is for. Each version is looked at before "
                "it is deleted, and one process at a time deletes a step. But a deletion that the store carries out "
                "more than a minute late can hit a later save's object: let only one job at a time use the directory",
                store.url(key),
            )
    finally:
        # With a limit: if the store does not answer, the caller gets that error now, not after a second timeout.
        with posix.telling(store.url(probe)), backend.ended_by(_after(_CLEANUP_S)):
            store.delete_version(probe, None)


def _why_tensorstore_cannot_read(store: ObjectBackend, probe: str) -> str | None:
    """Returns why TensorStore cannot read what was just written. None if it can, is not installed, or gives no answer.

    It has requests, credentials, proxies and certificates of its own.
    """
    try:
        from gracepoint.checkpoint.storage.backend import read_alone
    except ImportError:
        return None
    try:
        contents = read_alone(store.kvstore_spec(probe), _CLEANUP_S)
    except TimeoutError:  # as the store may be slow now: later saves try it
        logger.warning(
            "%s: TensorStore did not answer within %g s, so it was not checked", store.url(probe), _CLEANUP_S
        )
        return None
    except (ValueError, OSError) as error:
        return f"TensorStore cannot read from the store: {str(error).partition(' [source')[0]}"
    return None if contents == b"probe" else f"TensorStore reads {contents!r} where {b'probe'!r} was just written"


def _after(seconds: float) -> Callable[[], None]:
    """Returns what raises TimeoutError once so many seconds have passed."""
    until_s = time.monotonic() + seconds

    def go_on() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError(errno.ETIMEDOUT, f"not done after {seconds:g} s")

    return go_on


def _ignored(store: ObjectBackend, key: str, condition: str) -> OSError:
    return OSError(
        errno.ENOTSUP,
        f"{store.url(key)}: the store ignores {condition}, so two jobs could overwrite each other's checkpoints. "
        "Use a store with conditional writes",
    )


_LISTED_AT_ONCE = 1000
_AT_ONCE = 16  # requests of ``at_once``
_MORE_STREAMS = 16  # additional streams of all readers together (``requests``)


class ObjectBackend:
    """One bucket of an object store.

    Args:
        api: The requests to the bucket.
        hedges: Whether slow requests are made a second time.
        patience_s: Seconds for a request and its repetitions, if the caller has no deadline of its own.

    Attributes:
        tensorstore_error: Why TensorStore cannot read from the bucket, as ``check_usable`` has found out. None: it can,
            or that is not known.
    """

    renames = False
    is_far = True
    look_every_s = 2.0

    def __init__(self, api: ObjectApi, *, hedges: bool = True, patience_s: float = PATIENCE_S) -> None:
        self._api = api
        self.tensorstore_error: str | None = None
        self._streams = threading.BoundedSemaphore(_MORE_STREAMS)
        self._persistence = Persistence(lambda: Exchange(api.connections), hedges=hedges, patience_s=patience_s)

    def url(self, key: str) -> str:
        return self._api.url(key)

    def local_path(self, key: str) -> str:
        raise TypeError(f"{self.url(key)} is not in a file system: expected a local path")

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        return self._api.kvstore_spec(key)

    # One value.

    def create(self, key: str, data: bytes) -> Generation:
        return self.write(key, Bytes(data), crc32(data), ABSENT)

    def read(self, key: str) -> Value:
        def act(exchange: Exchange) -> Value:
            stored = self._api.get(exchange, key, 0, None, None)
            return Value(exchange.read(), stored.generation)

        with self._named(key):
            return self._persistence.run(f"GET {self.url(key)}", act, kind="read")

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        try:
            return self.write(key, Bytes(data), crc32(data), generation)
        except FileNotFoundError:
            raise StaleGeneration(errno.ESTALE, "the object was deleted meanwhile", self.url(key)) from None

    def put(self, key: str, data: bytes) -> None:
        self.write(key, Bytes(data), crc32(data), None)

    def touch(self, key: str) -> None:
        self.put(key, b"")

    def write_large(
        self, key: str, data: ArrayBytes, buffer: Buffer, go_on: GoOn, *, direct: bool, later: Later | None = None
    ) -> int:
        checksum = checksum_of(data, buffer, go_on)
        self.write(key, ArrayBody(data), checksum, None, go_on=go_on)
        return checksum

    def write(
        self,
        key: str,
        body: Body,
        checksum: int,
        only_if: Generation | None,
        *,
        says: str = "",
        go_on: GoOn | None = None,
    ) -> Generation:
        """Writes an object, and returns its generation.

        Args:
            key: The object.
            body: Its bytes.
            checksum: Their CRC-32.
            only_if: The generation that the object must have, or ``ABSENT``. None: there is no condition.
            says: First part of the note that is left with the object. The rest is random.
            go_on: Called again and again. An error that it raises ends the write. None: there is a timeout.

        Raises:
            FileExistsError: ``only_if`` is ``ABSENT``, and the object exists.
            StaleGeneration: The object has another generation.
        """
        uploads, size_bytes = self._api.uploads, len(body)
        if size_bytes > self._api.largest_bytes:
            raise OSError(
                errno.EFBIG,
                f"{size_bytes} bytes are too many for one object, expected at most {self._api.largest_bytes}: choose a "
                "smaller target_chunk_bytes, or shard the array",
                self.url(key),
            )
        note = f"{says} {secrets.token_hex(8)}".strip()

        def act(exchange: Exchange) -> Generation:
            return self._api.put(exchange, key, body, only_if, note, checksum)

        try:
            if uploads is not None and isinstance(body, ArrayBody) and size_bytes >= uploads.from_bytes:
                return requests.write(uploads, self._persistence, self.url(key), key, body, only_if, note, go_on)
            return self._persistence.run(
                f"PUT {self.url(key)}",
                act,
                kind="write",
                size_bytes=size_bytes,
                go_on=go_on or _go_on,
                patient=go_on is not None,
            )
        except ConditionFailed as error:
            stored = self.found(key)
            if stored is not None and stored.note == note:
                return stored.generation
            if only_if == ABSENT:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key)) from error
            raise StaleGeneration(
                errno.ESTALE, "the object was replaced or deleted meanwhile", self.url(key)
            ) from error

    def write_if(
        self,
        key: str,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: GoOn | None,
    ) -> Generation:
        condition = ABSENT if only_if is None else only_if
        return self.write(key, ArrayBody(data), checksum, condition, says=note, go_on=go_on)

    def noted(self, key: str) -> Noted | None:
        stored = self.found(key)
        return None if stored is None else Noted(stored.generation, stored.note)

    def has_direct_io(self, key: str) -> bool:
        return False

    def volume(self, key: str) -> int:
        return -1

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[ObjectReader]:
        reader = ObjectReader(self._api, self._persistence, key, self._streams)
        try:
            with self._named(key):
                reader.begin()
            yield reader
        finally:
            reader.close()

    def entry(self, key: str) -> Entry | None:
        stored = self.found(key)
        return None if stored is None else Entry(key, stored.bytes, stored.generation, stored.changed_s)

    def found(self, key: str) -> Found | None:
        """Returns what the store knows of an object, with its note. None if it does not exist."""
        if not key:
            return None
        return self._persistence.run(
            f"HEAD {self.url(key)}", lambda exchange: self._api.head(exchange, key), kind="head"
        )

    def delete(self, key: str) -> None:
        self.delete_version(key, None)

    def delete_version(self, key: str, generation: Generation | None, go_on: GoOn | None = None) -> bool:
        """Does as ``FlatBackend.delete_version``. ``go_on``: as in ``write``."""
        try:
            self._persistence.run(
                f"DELETE {self.url(key)}",
                lambda exchange: self._api.delete(exchange, key, generation),
                kind="delete",
                go_on=go_on or _go_on,
                hedge=generation is None,  # a second request could come late, to a store that ignores the condition
            )
        except ConditionFailed:
            return False
        return True

    # Folders.

    def exists(self, key: str) -> bool:
        return self.found(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        return any(True for _ in self._pages(_prefix(key), flat=True, limit=1))

    def is_link(self, key: str) -> bool:
        return False

    def children(self, key: str) -> list[Child]:
        prefix = _prefix(key)
        found = [
            child
            for entries, folders in self._pages(prefix, flat=False)
            for child in (
                *(Child(entry.key.removeprefix(prefix), is_folder=False) for entry in entries if entry.key != prefix),
                *(Child(folder.removeprefix(prefix).rstrip("/"), is_folder=True) for folder in folders),
            )
        ]
        if not found and not self.is_folder(key):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))
        return found

    def entries(self, key: str) -> list[Entry]:
        prefix = _prefix(key)
        return [
            Entry(entry.key.removeprefix(prefix), entry.bytes, entry.generation, entry.changed_s)
            for entries, _ in self._pages(prefix, flat=True)
            for entry in entries
            if not entry.key.endswith("/")  # what consoles make to show an empty folder
        ]

    def last_change_s(self, key: str) -> float:
        entries = [] if (entry := self.entry(key)) is None else [entry]
        return max((entry.changed_s for entry in (*entries, *self.entries(key))), default=0.0)

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        if exclusive:
            raise TypeError(f"{self.url(key)}: an object store has no folders that one caller could make")

    def make_folder_durably(self, key: str) -> None:
        """Does nothing, as a prefix needs no object."""

    def delete_folder(self, key: str) -> None:
        self.delete_all(Entry(f"{_prefix(key)}{entry.key}", 0, entry.generation, 0.0) for entry in self.entries(key))

    def delete_all(self, entries: Iterable[Entry], go_on: GoOn | None = None) -> None:
        refused: list[PermissionError] = []

        def delete(entry: Entry) -> None:
            try:
                self.delete_version(entry.key, entry.generation, go_on)
            except PermissionError as error:  # a lock or a retention policy of one object says nothing of the others
                refused.append(error)

        self.at_once(functools.partial(delete, entry) for entry in entries)
        if refused:
            raise refused[0]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        requests.run(list(acts), threads=_AT_ONCE)

    def publish(self, source: str, target: str) -> None:
        raise TypeError(f"{self.url(source)}: an object store cannot rename")

    @contextlib.contextmanager
    def staying(self, key: str) -> Iterator[Callable[[], bool]]:
        yield lambda: True  # nothing is ever renamed

    def sync(self, keys: Iterable[str]) -> None:
        """Does nothing, as an object is durable when the store has answered."""

    def now_s(self, key: str) -> float:
        if not self._api.clock.is_known:
            self.is_folder(key)  # any request will do: its reply tells the store's time
        return self._api.clock.now_s()

    def check_usable(self, key: str) -> None:
        check(self, key)

    def _pages(
        self, prefix: str, *, flat: bool, limit: int | None = None
    ) -> Iterator[tuple[tuple[Entry, ...], tuple[str, ...]]]:
        """Yields the pages of a listing that are not empty. With ``limit``, only the first page, of so many names."""
        token: str | None = None
        while True:

            def act(exchange: Exchange, token: str | None = token) -> Any:
                return self._api.list(exchange, prefix, flat=flat, token=token, limit=limit or _LISTED_AT_ONCE)

            page = self._persistence.run(f"LIST {self.url(prefix)}", act, kind="list")
            if page.entries or page.folders:
                yield tuple(page.entries), tuple(page.folders)
            token = page.token
            if token is None or limit is not None:
                return

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key)) from error


def _prefix(key: str) -> str:
    return f"{key}/" if key else ""


def _go_on() -> None:
    pass


_APIS: dict[str, Callable[[str], ObjectApi]] = {"gs": GcsApi, "s3": S3Api}
# What variables begin with that say which server is used, and as which user. With another value, another back end is
# made.
_SETTINGS = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_")
_lock = threading.Lock()
_opened: dict[tuple[object, ...], ObjectBackend] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def open_bucket(scheme: str, bucket: str) -> ObjectBackend:
    """Returns the back end of a bucket. Makes no request.

    Raises:
        SettingsError: A setting is missing, or the extra of the scheme is not installed.
    """
    if scheme == "gs":
        gcs.name_for_tensorstore(os.environ)  # before the settings are read, as it changes them
    settings = (scheme, bucket, *sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)))
    with _lock:
        if settings not in _opened:
            _opened[settings] = ObjectBackend(_APIS[scheme](bucket))
        return _opened[settings]
