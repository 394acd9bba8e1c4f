"""Credentials that expire, and are renewed before they do.

A thread ("gracepoint: credentials", a daemon) finds and renews them, one at a time for each ``Renewed``. It lives as
long as the call into the cloud's library, which can take minutes, and which nothing can interrupt. A request waits for
the thread only if there are no valid credentials, and only as long as the request has time. The lock guards all
attributes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gracepoint.checkpoint.storage.backend import NotAdmitted
from gracepoint.checkpoint.storage.objects.http.request_errors import Transient
from gracepoint.checkpoint.storage.objects.http.wire import LOOK_EVERY_S, STALL_S
from gracepoint.daemon_thread import DaemonThread
from gracepoint.errors import SettingsError

logger = logging.getLogger(__name__)

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
    """

    def __init__(self, what: str, find: Callable[[bool], StoreCredentials[T]]) -> None:
        self._what = what
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
            if time.monotonic() - self._found_s < RENEW_BEFORE_S:
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
        except RuntimeError as error:  # the system has no more threads, or the interpreter is about to end
            self._renewing, self._error, self._failed_s = None, error, time.monotonic()

    def _renew(self) -> None:
        found: StoreCredentials[T] | None = None
        error: Exception | None = None
        try:
            found = self._find(self._is_refused)
        except Exception as raised:  # noqa: BLE001 - the clouds' libraries raise many types; ``get`` raises it
            error = raised
            logger.warning("%s: not renewed: %s", self._what, raised)
        with self._lock:
            self._renewing, self._error = None, error
            if found is None:
                self._failed_s = time.monotonic()
            else:
                self._found, self._found_s, self._is_refused = found, time.monotonic(), False
            self._changed.notify_all()

    def _raise(self, error: Exception) -> None:
        if isinstance(error, NotAdmitted):
            raise NotAdmitted(*error.args) from error
        if isinstance(error, SettingsError):
            raise SettingsError(*error.args) from error
        raise Transient(f"{self._what}: they could not be renewed: {error}") from error
