"""What an object store's API offers. ``gcs`` and ``s3`` implement it, and share errors, the clock and credentials.

Each method of ``ObjectApi`` and ``Uploads`` makes one request. ``refused`` turns replies that are errors into
exceptions, in the same way for both.

``Renewed`` renews credentials before they expire. A thread ("gracepoint: credentials", a daemon) finds them, one at a
time for each ``Renewed``. It lives as long as the call into the cloud's library, which can take minutes, and which
nothing can interrupt. A request waits for the thread only if there are no valid credentials, and only as long as the
request has time. The lock guards all attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar
from xml.etree import ElementTree

from gracepoint.checkpoint.storage.objects.http import LOOK_EVERY_S, STALL_S, Body, Connections, Exchange
from gracepoint.checkpoint.storage.storage_path import Entry, Generation, NotAdmitted
from gracepoint.errors import SettingsError
from gracepoint.threads import DaemonThread, NoThread

logger = logging.getLogger(__name__)

#: Condition of a write: the object must not exist.
ABSENT = Generation("")
#: Name of the metadata field in which a writer leaves a note.
NOTE = "gracepoint"

GoOn = Callable[[], None]
_SHOWN = 300


@dataclasses.dataclass(frozen=True)
class Found:
    """An object that exists.

    Attributes:
        bytes: Its size.
        generation: Its version.
        changed_s: Time of the write, in seconds since the epoch by the store's clock.
        note: What its writer noted with it. Empty if it noted nothing.
    """

    bytes: int
    generation: Generation
    changed_s: float
    note: str


@dataclasses.dataclass(frozen=True)
class Page:
    """A part of a listing.

    Attributes:
        entries: Objects, with their complete names.
        folders: Common prefixes up to the delimiter, with it.
        token: What continues the listing. None at its end.
    """

    entries: Sequence[Entry]
    folders: Sequence[str]
    token: str | None


class ObjectApi(Protocol):
    """The requests to one bucket. Each raises ``Transient`` or ``Unreachable`` if it may be made again.

    Attributes:
        connections: The connections to the store.
        clock: The clock of the store.
        largest_bytes: Largest size of an object.
        uploads: The requests for large objects. None: one request writes an object of any size.
    """

    connections: Connections
    clock: StoreClock
    largest_bytes: int
    uploads: Uploads | None

    def url(self, key: str) -> str:
        """Returns the URI of an object or folder."""

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        """Returns TensorStore's spec of all objects whose names begin with ``key``."""

    def put(
        self, exchange: Exchange, key: str, body: Body, only_if: Generation | None, note: str, crc32: int
    ) -> Generation:
        """Writes an object. Returns its generation.

        ``only_if`` is the generation that the object must have, or ``ABSENT``. None: there is no condition. ``crc32``
        is the CRC-32 of the bytes, for stores that check it. For other stores the method computes a checksum that they
        check.

        Raises:
            ConditionFailed: The object has another generation.
        """

    def get(self, exchange: Exchange, key: str, first: int, stop: int | None, generation: Generation | None) -> Found:
        """Asks for a range of an object, or for all of it if ``first`` is 0 and ``stop`` is None.

        The caller reads the bytes from ``exchange``. The note is not filled in.

        Raises:
            FileNotFoundError: The object does not exist. Some stores also say so if it has another generation.
            ConditionFailed: The object has another generation.
        """

    def head(self, exchange: Exchange, key: str) -> Found | None:
        """Returns what the store knows of an object. None if it does not exist."""

    def list(self, exchange: Exchange, prefix: str, *, flat: bool, token: str | None, limit: int) -> Page:
        """Lists the objects whose names begin with ``prefix``; if not ``flat``, up to the next slash."""

    def delete(self, exchange: Exchange, key: str, generation: Generation | None) -> None:
        """Deletes an object, if it has ``generation`` or ``generation`` is None. Does nothing if it does not exist.

        Raises:
            ConditionFailed: The object has another generation. Some stores do not say so, and delete nothing.
        """


class Uploads(Protocol):
    """The requests of uploads in parts. Each raises ``Transient`` or ``Unreachable`` if it may be made again.

    Attributes:
        from_bytes: Size of an object from which it is uploaded in parts.
    """

    from_bytes: int

    def begin(self, exchange: Exchange, key: str, note: str) -> str:
        """Begins an upload. Returns its identifier. ``note`` will be left with the object."""

    def put(self, exchange: Exchange, key: str, upload: str, number: int, body: Body, crc32: int) -> str:
        """Writes a part. ``number`` counts the parts from 1. Returns the part's entity tag."""

    def complete(
        self, exchange: Exchange, key: str, upload: str, parts: Sequence[tuple[str, int]], only_if: Generation | None
    ) -> Generation:
        """Makes the object of its parts, in order. ``parts`` has the entity tag and CRC-32 of each.

        Raises:
            ConditionFailed: The object has another generation than ``only_if``, or the upload is over.
            UploadConflict: The upload cannot be completed any more.
        """

    def abort(self, exchange: Exchange, key: str, upload: str) -> None:
        """Ends an upload. The store deletes its parts."""


#: Two answers of a clock differ by at least this. It is large enough to show in a float of seconds since the epoch.
_LEAST_STEP_S = 1e-6


class StoreClock:
    """The store's clock, as its replies show it, to a second. Any thread uses it.

    If this machine's clock agrees with all replies, it is used, as it is finer. Between replies the monotonic clock
    counts, so that the answers stay right when this machine's clock is set. They never go back, even if a reply
    corrects the clock: of two saves of this process, the later one has the later time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Bounds on the seconds by which the store's clock is ahead of this machine's monotonic one.
        self._least_s, self._most_s = float("-inf"), float("inf")
        self._last_s = 0.0  # the latest answer

    def observe(self, date: str | None, sent_s: float) -> None:
        """Notes the header ``Date`` of a reply to a request that was sent at ``sent_s`` by ``time.monotonic()``."""
        if date is None:
            return
        try:
            date_s = email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        least_s, most_s = date_s - time.monotonic(), date_s + 1.0 - sent_s
        with self._lock:
            self._least_s, self._most_s = max(self._least_s, least_s), min(self._most_s, most_s)
            if self._least_s > self._most_s:  # the store's clock was set, or this machine was suspended
                self._least_s, self._most_s = least_s, most_s

    @property
    def is_known(self) -> bool:
        """True once a reply had the time."""
        return self._most_s != float("inf")

    def now_s(self) -> float:
        """Returns seconds since the epoch, more than at any call before."""
        with self._lock:
            monotonic_s = time.monotonic()
            now_s = monotonic_s + min(max(time.time() - monotonic_s, self._least_s), self._most_s)
            self._last_s = max(now_s, self._last_s + _LEAST_STEP_S)
            return self._last_s


class Transient(OSError):
    """The store did not carry the request out, and may do so later.

    Attributes:
        after_s: Seconds to wait at least, as the store asks. 0 if it does not ask.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(errno.EAGAIN, message)
        self.after_s = after_s


class ConditionFailed(OSError):
    """The object does not have the generation that a request asked for. Or the upload of the request has ended."""


class UploadConflict(OSError):
    """Another writer interfered with the end of an upload. The upload must be made again."""


def refused(subject: str, exchange: Exchange, code: str, message: str, *, writes: bool) -> OSError:
    """Returns the error for a reply that is not a success.

    Args:
        subject: The method and the URI, for the message.
        exchange: The exchange, whose head has been received.
        code: The store's own code for the error. Empty if it gave none.
        message: The store's explanation.
        writes: Whether the request was to write or delete.
    """
    status = exchange.status
    message_shown = f"{subject}: {status} {code} {message[:_SHOWN]}".strip()
    if status == 412:
        return ConditionFailed(errno.ESTALE, message_shown)
    if code == "NoSuchUpload":
        return ConditionFailed(errno.ESTALE, message_shown)
    if code == "NoSuchBucket":
        return OSError(errno.ENODEV, f"{message_shown}. The bucket does not exist: create it, or correct its name")
    if status == 404 and code in _MISSING:
        return FileNotFoundError(errno.ENOENT, message_shown)
    if code == "RequestTimeTooSkewed":
        return NotAdmitted(errno.EIO, f"{message_shown}. This machine's clock is wrong: set it, for example with NTP")
    if code in _QUOTA or status == 507:
        return OSError(errno.EDQUOT, f"{message_shown}. The quota is used up: raise it, or delete old checkpoints")
    if status in (408, 409, 429) or status >= 500 or code in _AGAIN:
        return Transient(message_shown, _after_s(exchange))
    if status in (401, 403, 404) or code in _UNKNOWN:
        message_shown = (
            f"{message_shown}. Check this process's credentials, and that they may read, create, list and delete"
        )
        if status == 403 and writes and code not in _UNKNOWN:
            message_shown = (
                f"{message_shown}. If the bucket's policy demands encryption, set objectStore.serverSideEncryption"
            )
            return PermissionError(errno.EACCES, message_shown)
        return NotAdmitted(errno.EIO, message_shown)
    return OSError(errno.EIO, message_shown)


#: S3's codes for credentials that were valid before.
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"})
_QUOTA = frozenset(
    {"QuotaExceeded", "quotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageQuotaExceeded"}
)
# S3's codes for a request whose sender it does not know.
_UNKNOWN = EXPIRED | {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthorizationHeaderMalformed"}
_MISSING = frozenset({"", "notFound", "NotFound", "NoSuchKey", "NoSuchVersion"})
_AGAIN = frozenset({"RequestTimeout", "SlowDown", "rateLimitExceeded", "userRateLimitExceeded", "InternalError"})
_LONGEST_AFTER_S = 10.0


def _after_s(exchange: Exchange) -> float:
    try:
        return min(max(0.0, float(exchange.headers.get("retry-after", "0"))), _LONGEST_AFTER_S)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def parsing(subject: str) -> Iterator[None]:
    """Raises ``Transient`` if a reply is not what the store sends: a proxy may have answered in its place."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as error:
        raise Transient(f"{subject}: the reply is not one of the store: {type(error).__name__}: {error}") from error


def total_bytes(exchange: Exchange, first: int) -> int:
    """Returns the size of the whole object, from the head of a reply to ``get`` from ``first`` on.

    Raises:
        ValueError: The reply is of another range.
        KeyError: The reply does not say the size.
    """
    unit, _, header = exchange.headers.get("content-range", "").partition(" ")
    span, _, total = header.partition("/")
    if exchange.status != 206:
        if first:
            raise ValueError(f"the whole object, expected it from byte {first}")
        return int(exchange.headers["content-length"])
    if unit != "bytes" or span.partition("-")[0] != str(first):
        raise ValueError(f"range {header!r}, expected bytes from {first}")
    return int(total)


def changed_s(exchange: Exchange) -> float:
    """Returns the time in the header ``Last-Modified``, in seconds since the epoch. 0 if there is none."""
    try:
        return email.utils.parsedate_to_datetime(exchange.headers.get("last-modified", "")).timestamp()
    except (ValueError, TypeError):
        return 0.0


T = TypeVar("T")

#: Credentials are renewed when they are valid for less than this.
RENEW_BEFORE_S = 300.0
_USED_UP_S = 5.0  # credentials that are valid for less than this are not sent any more
_PAUSE_S = 1.0  # after a renewal that failed


@dataclasses.dataclass(frozen=True)
class StoreCredentials(Generic[T]):
    """Credentials that were found.

    Attributes:
        value: What is sent.
        lasts: Returns whether they are still valid after so many seconds.
    """

    value: T
    lasts: Callable[[float], bool]


class Renewed(Generic[T]):
    """The credentials for one store. Any thread uses them.

    Args:
        what: What they are, for messages.
        find: Finds or renews them. It may take minutes. Its argument is whether the server refused the last ones.
        believes_refusals: Whether a refusal counts at once. Otherwise new ones are given some time first.
    """

    def __init__(
        self, subject: str, find: Callable[[bool], StoreCredentials[T]], *, believes_refusals: bool = False
    ) -> None:
        self._believes_refusals = believes_refusals
        self._what = subject
        self._find = find
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._found: StoreCredentials[T] | None = None
        self._found_s = float("-inf")
        self._is_refused = False
        self._renewing: DaemonThread | None = None
        self._error: Exception | None = None  # of the last renewal
        self._failed_s = float("-inf")

    def get(self, go_on: Callable[[], None]) -> T:
        """Returns valid credentials. While it waits for them, it calls ``go_on``, whose error ends the wait.

        Raises:
            NotAdmitted: There are none.
            Transient: They could not be renewed yet.
        """
        until_s = time.monotonic() + STALL_S
        is_begun = False
        while True:
            with self._lock:
                if self._found is not None and self._found.lasts(RENEW_BEFORE_S):
                    return self._found.value
                if not self._is_renewing and time.monotonic() - self._failed_s >= _PAUSE_S and not is_begun:
                    is_begun = True
                    self._begin()
                if self._found is not None and self._found.lasts(_USED_UP_S):
                    return self._found.value
                if not self._is_renewing:
                    if self._error is None:  # what was found is about to expire, and nothing else is to be had
                        raise Transient(f"{self._what}: what was found has expired")
                    self._raise(self._error)
                self._changed.wait(LOOK_EVERY_S)
            go_on()
            if time.monotonic() > until_s:
                raise Transient(f"{self._what}: they are being renewed for longer than {STALL_S:.0f} s")

    def refused(self, value: T) -> bool:
        """Notes that the server refused credentials. Returns whether others may help: then ``get`` renews them."""
        with self._lock:
            if self._found is None or self._found.value != value:
                return True
            if not self._believes_refusals and time.monotonic() - self._found_s < RENEW_BEFORE_S:
                return False
            self._found, self._is_refused = None, True
            return True

    @property
    def _is_renewing(self) -> bool:
        # As the thread says: one whose start was interrupted may never run.
        return self._renewing is not None and not self._renewing.ended

    def _begin(self) -> None:
        self._renewing = thread = DaemonThread(self._renew, "gracepoint: credentials")
        try:
            thread.start()
        except NoThread as error:  # the system has no more threads, or the interpreter is about to end
            self._renewing, self._error, self._failed_s = None, error, time.monotonic()

    def _renew(self) -> None:
        renewed: StoreCredentials[T] | None = None
        error: Exception | None = None
        try:
            renewed = self._find(self._is_refused)
        except Exception as raised:  # noqa: BLE001 - the clouds' libraries raise many types; ``get`` raises it
            error = raised
            logger.warning("%s: not renewed: %s", self._what, raised)
        with self._lock:
            self._renewing, self._error = None, error
            if renewed is None:
                self._failed_s = time.monotonic()
            else:
                self._found, self._found_s, self._is_refused = renewed, time.monotonic(), False
            self._changed.notify_all()

    def _raise(self, error: Exception) -> None:
        if isinstance(error, NotAdmitted):
            raise NotAdmitted(*error.args) from error
        if isinstance(error, SettingsError):
            raise SettingsError(*error.args) from error
        raise Transient(f"{self._what}: they could not be renewed: {error}") from error
