"""Checkpoints in an object store. There are no directories, renames, links or locks; there are conditional requests.

A write is visible and durable as a whole when its reply has arrived. If the reply is lost, the request is made again.
The store may then answer that the condition does not hold, as the first request has changed the object. So each write
leaves a separate note with the object, and a write whose condition failed reads the object's note. If that is its own
note, the write has succeeded.

A folder is a prefix of names, so making a folder does nothing, and an empty folder does not exist. ``publish`` and
``make_folder(exclusive=True)`` are not available: steps are committed by a manifest (``steps.manifest_commit``).

Keys are the names of objects in the bucket. ``object_path`` opens buckets by their URI's scheme: one bucket with one
set of settings is one store, for the whole process. ``check_usable`` looks at the start of a job whether a store does
what checkpoints rely on. There are no threads here but those of ``persistence`` and ``requests``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.buffers import Buffer, Later, checksum_of
from gracepoint.checkpoint.storage.objects import gcs, requests
from gracepoint.checkpoint.storage.objects.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.http import ArrayBody, Body, Bytes, Exchange
from gracepoint.checkpoint.storage.objects.persistence import PATIENCE_S, Persistence
from gracepoint.checkpoint.storage.objects.provider import ABSENT, ConditionFailed, Found, GoOn, ObjectApi
from gracepoint.checkpoint.storage.objects.requests import ObjectReader
from gracepoint.checkpoint.storage.objects.s3 import S3Api
from gracepoint.checkpoint.storage.storage_path import (
    Child,
    Entry,
    Generation,
    Noted,
    StaleGeneration,
    StoragePath,
    Value,
    ended_by,
)
from gracepoint.checksum import crc32

logger = logging.getLogger(__name__)

#: Seconds that the deletion of the object may take, and TensorStore's read of it.
_CLEANUP_S = 10.0
_LISTED_AT_ONCE = 1000
_AT_ONCE = 16  # requests of ``at_once``
_MORE_STREAMS = 16  # additional streams of all readers together (``requests``)


class BucketStore:
    """One bucket, and how its requests are made. Any thread uses it.

    Args:
        api: The requests to the bucket.
        hedges: Whether slow requests are made a second time.
        patience_s: Seconds for a request and its repetitions, if the caller has no deadline.

    Attributes:
        tensorstore_error: Why TensorStore cannot read from the bucket, as ``check_usable`` has found out. None: it can,
            or that is not known.
    """

    def __init__(self, api: ObjectApi, *, hedges: bool = True, patience_s: float = PATIENCE_S) -> None:
        self.api = api
        self.tensorstore_error: str | None = None
        self.streams = threading.BoundedSemaphore(_MORE_STREAMS)
        self.persistence = Persistence(lambda: Exchange(api.connections), hedges=hedges, patience_s=patience_s)


class ObjectPath(StoragePath):
    """The name of an object, or a prefix of names, in a bucket."""

    __slots__ = ()

    renames = False
    is_far = True
    look_every_s = 2.0
    store: BucketStore

    def __reduce__(self) -> tuple[Any, ...]:
        return object_path, (str(self),)

    def __str__(self) -> str:
        return self.store.api.url(self.key)

    def kvstore_spec(self) -> dict[str, Any]:
        return self.store.api.kvstore_spec(f"{self.key}/")

    @property
    def tensorstore_error(self) -> str | None:
        return self.store.tensorstore_error

    # One value.

    def create(self, data: bytes) -> Generation:
        return self.write(Bytes(data), crc32(data), ABSENT)

    def read(self) -> Value:
        def act(exchange: Exchange) -> Value:
            stored = self.store.api.get(exchange, self.key, 0, None, None)
            return Value(exchange.read(), stored.generation)

        with self._named():
            return self.store.persistence.run(f"GET {self}", act, kind="read")

    def replace(self, data: bytes, generation: Generation) -> Generation:
        try:
            return self.write(Bytes(data), crc32(data), generation)
        except FileNotFoundError:
            raise StaleGeneration(errno.ESTALE, "the object was deleted meanwhile", str(self)) from None

    def put(self, data: bytes) -> None:
        self.write(Bytes(data), crc32(data), None)

    def touch(self) -> None:
        self.put(b"")

    def write_large(
        self, data: ArrayBytes, buffer: Buffer, go_on: GoOn, *, direct: bool, later: Later | None = None
    ) -> int:
        checksum = checksum_of(data, buffer, go_on)
        self.write(ArrayBody(data), checksum, None, go_on=go_on)
        return checksum

    def write(
        self,
        body: Body,
        checksum: int,
        only_if: Generation | None,
        *,
        says: str = "",
        go_on: GoOn | None = None,
    ) -> Generation:
        """Writes the object, and returns its generation.

        Args:
            body: Its bytes.
            checksum: Their CRC-32.
            only_if: The generation that the object must have, or ``ABSENT``. None: there is no condition.
            says: First part of the note that is left with the object. The rest is random.
            go_on: Called again and again. An error that it raises ends the write. None: there is a timeout.

        Raises:
            FileExistsError: ``only_if`` is ``ABSENT``, and the object exists.
            StaleGeneration: The object has another generation.
        """
        uploads, size_bytes = self.store.api.uploads, len(body)
        if size_bytes > self.store.api.largest_bytes:
            raise OSError(
                errno.EFBIG,
                f"{size_bytes} bytes are too many for one object, expected at most {self.store.api.largest_bytes}: "
                "choose a smaller target_chunk_bytes, or shard the array",
                str(self),
            )
        note = f"{says} {secrets.token_hex(8)}".strip()

        def act(exchange: Exchange) -> Generation:
            return self.store.api.put(exchange, self.key, body, only_if, note, checksum)

        try:
            if uploads is not None and isinstance(body, ArrayBody) and size_bytes >= uploads.from_bytes:
                return requests.write(uploads, self.store.persistence, str(self), self.key, body, only_if, note, go_on)
            return self.store.persistence.run(
                f"PUT {self}",
                act,
                kind="write",
                size_bytes=size_bytes,
                go_on=go_on or _go_on,
                patient=go_on is not None,
            )
        except ConditionFailed as error:
            stored = self.found()
            if stored is not None and stored.note == note:
                return stored.generation
            if only_if == ABSENT:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self)) from error
            raise StaleGeneration(errno.ESTALE, "the object was replaced or deleted meanwhile", str(self)) from error

    def write_if(
        self,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: GoOn | None,
    ) -> Generation:
        condition = ABSENT if only_if is None else only_if
        return self.write(ArrayBody(data), checksum, condition, says=note, go_on=go_on)

    def noted(self) -> Noted | None:
        stored = self.found()
        return None if stored is None else Noted(stored.generation, stored.note)

    @contextlib.contextmanager
    def open(self) -> Iterator[ObjectReader]:
        reader = ObjectReader(self.store.api, self.store.persistence, self.key, self.store.streams)
        try:
            with self._named():
                reader.begin()
            yield reader
        finally:
            reader.close()

    def entry(self) -> Entry | None:
        stored = self.found()
        return None if stored is None else Entry(self.key, stored.bytes, stored.generation, stored.changed_s)

    def found(self) -> Found | None:
        """Returns what the store knows of the object, with its note. None if it does not exist."""
        if not self.key:
            return None
        return self.store.persistence.run(
            f"HEAD {self}", lambda exchange: self.store.api.head(exchange, self.key), kind="head"
        )

    def delete(self) -> None:
        self.delete_version(None)

    def delete_version(self, generation: Generation | None, go_on: GoOn | None = None) -> bool:
        try:
            self.store.persistence.run(
                f"DELETE {self}",
                lambda exchange: self.store.api.delete(exchange, self.key, generation),
                kind="delete",
                go_on=go_on or _go_on,
                hedge=generation is None,  # a second request could come late, to a store that ignores the condition
            )
        except ConditionFailed:
            return False
        return True

    # Folders.

    def exists(self) -> bool:
        return self.found() is not None or self.is_folder()

    def is_folder(self) -> bool:
        return any(True for _ in self._pages(_prefix(self.key), flat=True, limit=1))

    def children(self) -> list[Child]:
        prefix = _prefix(self.key)
        children = [
            child
            for entries, folders in self._pages(prefix, flat=False)
            for child in (
                *(Child(entry.key.removeprefix(prefix), is_folder=False) for entry in entries if entry.key != prefix),
                *(Child(folder.removeprefix(prefix).rstrip("/"), is_folder=True) for folder in folders),
            )
        ]
        if not children and not self.is_folder():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return children

    def entries(self) -> list[Entry]:
        prefix = _prefix(self.key)
        return [
            Entry(entry.key.removeprefix(prefix), entry.bytes, entry.generation, entry.changed_s)
            for entries, _ in self._pages(prefix, flat=True)
            for entry in entries
            if not entry.key.endswith("/")  # what consoles make to show an empty folder
        ]

    def last_change_s(self) -> float:
        entries = [] if (entry := self.entry()) is None else [entry]
        return max((entry.changed_s for entry in (*entries, *self.entries())), default=0.0)

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        if exclusive:
            raise TypeError(f"{self}: an object store has no folders that one caller could make")

    def make_folder_durably(self) -> None:
        """Does nothing, as a prefix needs no object."""

    def delete_folder(self) -> None:
        self.delete_entries(self.entries())

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        requests.run(list(acts), threads=_AT_ONCE)

    def publish(self, target: StoragePath) -> None:
        raise TypeError(f"{self}: an object store cannot rename")

    @contextlib.contextmanager
    def staying(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True  # nothing is ever renamed

    def sync(self) -> None:
        """Does nothing, as an object is durable when the store has answered."""

    def now_s(self) -> float:
        if not self.store.api.clock.is_known:
            self.is_folder()  # any request will do: its reply tells the store's time
        return self.store.api.clock.now_s()

    def check_usable(self) -> None:
        """Creates, reads, lists, replaces and deletes an object below, also with conditions that do not hold.

        Without conditions on deletions, a store is used with a warning.

        Raises:
            OSError: A request failed, or the store ignores a condition of a write. The message says which one.
        """
        probe = self / f".gracepoint-probe.{secrets.token_hex(8)}"
        try:
            created = probe.create(b"probe")
            if probe.read_bytes() != b"probe":
                raise OSError(errno.EIO, f"{probe}: was read with other contents than it was written with")
            self.store.tensorstore_error = _why_tensorstore_cannot_read(probe)
            if self.store.tensorstore_error is not None:
                logger.warning(
                    "%s: %s. Saves in OCDBT or with compression are refused, and what is stored so cannot be restored",
                    self,
                    self.store.tensorstore_error,
                )
            if not self.is_folder():
                raise OSError(errno.EIO, f"{self}: the store lists no object there, though one was just written")
            with contextlib.suppress(FileExistsError):
                probe.create(b"other")
                raise self._ignored("the condition that an object must not exist")
            replaced = probe.replace(b"replaced", created)
            with contextlib.suppress(StaleGeneration):
                probe.replace(b"late", created)
                raise self._ignored("which version of an object a write may replace")
            probe.delete_version(created)
            stored = probe.found()
            if stored is None or stored.generation != replaced:
                logger.warning(
                    "%s: the store ignores which version of an object a deletion is for. Each version is looked at "
                    "before it is deleted, and one process at a time deletes a step. But a deletion that the store "
                    "carries out more than a minute late can hit a later save's object: let only one job at a time use "
                    "the directory",
                    self,
                )
        finally:
            # With a limit: if the store does not answer, the caller gets that error now, not after a second timeout.
            with undeleted.deleting(probe), ended_by(_after(_CLEANUP_S)):
                probe.delete_version(None)

    def _ignored(self, condition: str) -> OSError:
        return OSError(
            errno.ENOTSUP,
            f"{self}: the store ignores {condition}, so two jobs could overwrite each other's checkpoints. "
            "Use a store with conditional writes",
        )

    def _pages(
        self, prefix: str, *, flat: bool, limit: int | None = None
    ) -> Iterator[tuple[tuple[Entry, ...], tuple[str, ...]]]:
        """Yields the pages of a listing that are not empty. With ``limit``, only the first page, of so many names."""
        token: str | None = None
        while True:

            def act(exchange: Exchange, token: str | None = token) -> Any:
                return self.store.api.list(exchange, prefix, flat=flat, token=token, limit=limit or _LISTED_AT_ONCE)

            page = self.store.persistence.run(f"LIST {self.store.api.url(prefix)}", act, kind="list")
            if page.entries or page.folders:
                yield tuple(page.entries), tuple(page.folders)
            token = page.token
            if token is None or limit is not None:
                return

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error


def _prefix(key: str) -> str:
    return f"{key}/" if key else ""


def _go_on() -> None:
    pass


def _why_tensorstore_cannot_read(probe: ObjectPath) -> str | None:
    """Returns why TensorStore cannot read what was just written. None if it can, is not installed, or gives no answer.

    It has requests, credentials, proxies and certificates of its own.
    """
    try:
        from gracepoint.checkpoint.storage.in_memory import read_alone
    except ImportError:
        return None
    try:
        contents = read_alone(probe.store.api.kvstore_spec(probe.key), _CLEANUP_S)
    except TimeoutError:  # as the store may be slow now: later saves try it
        logger.warning("%s: TensorStore did not answer within %g s, so it was not checked", probe, _CLEANUP_S)
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


_APIS: dict[str, Callable[[str], ObjectApi]] = {"gs": GcsApi, "s3": S3Api}
# What variables begin with that say which server is used, and as which user. With another value, another store is
# opened.
_SETTINGS = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_")
_lock = threading.Lock()
_opened: dict[tuple[object, ...], BucketStore] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def object_path(uri: str) -> ObjectPath:
    """Returns the location that has this URI. Makes no request.

    Raises:
        SettingsError: A setting is missing, or the extra of the scheme is not installed.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "gs":
        gcs.name_for_tensorstore(os.environ)  # before the settings are read, as it changes them
    settings = (scheme, bucket, *sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)))
    with _lock:
        if settings not in _opened:
            _opened[settings] = BucketStore(_APIS[scheme](bucket))
        return ObjectPath(_opened[settings], key.rstrip("/"))
