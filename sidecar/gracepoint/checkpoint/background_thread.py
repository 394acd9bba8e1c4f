"""Runs functions in the background, one at a time, each on a separate thread.

One thread owns this object and starts functions. The thread of a function ends with the function, and says so itself
(``DaemonThread``): an exception that leaves the owner's ``start`` or ``wait`` changes nothing about what ``busy`` says.
After that, the owner reads its outcome by ``wait`` or ``take_error``. An error that was not read is logged when this
object is deleted. The thread is a daemon: a save that hangs never keeps a process from ending. Any thread may ask
``busy`` and ``thread_id``, also while the owner's wait ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.threads import DaemonThread

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05


class BackgroundThread:
    """Runs functions one after the other. An error is kept until ``take_error`` is called."""

    def __init__(self) -> None:
        self._thread: DaemonThread | None = None
        self._name = ""
        self._error: Exception | None = None  # written by the thread, read once it has ended
        self._failed = ""  # the name of the function that ended with the error

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Starts ``function``. No other function may be running.

        If an exception of a signal handler leaves this, the function may run: ``busy`` knows.

        Raises:
            RuntimeError: No thread can be started, or the interpreter ends.
        """
        assert not self.busy

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - kept for the training thread
                self._error, self._failed = error, name
            except BaseException as error:  # noqa: BLE001 - a callback that calls sys.exit() must not count as success
                failure = SaveFailed(f"{name} was ended by {error!r}")
                failure.__cause__ = error
                self._error, self._failed = failure, name

        thread = DaemonThread(run, f"gracepoint: {name}")
        self._name, self._thread = name, thread
        thread.start()

    def __del__(self) -> None:
        # May run in the thread of the function, which holds a reference to this object until it ends.
        if self._error is not None:
            logger.error("%s failed, and the caller never waited for it: %s", self._failed, self._error)

    @property
    def busy(self) -> bool:
        thread = self._thread  # read once: the owner may set it to None meanwhile
        return thread is not None and not thread.ended

    @property
    def has_failed(self) -> bool:
        """True if a function has ended with an error that was not taken yet."""
        return self._error is not None and not self.busy

    @property
    def thread_id(self) -> int | None:
        """Identifier of the thread of the function that was started last. None if a wait has seen that thread end."""
        thread = self._thread
        return None if thread is None else thread.ident

    def wait(self, timeout_s: float) -> None:
        """Waits until no function runs. ``take_error`` then returns its error.

        Raises:
            SaveFailed: The function still ran after ``timeout_s``.
        """
        if self._thread is None:
            return
        if not self._thread.wait(timeout_s):
            raise SaveFailed(f"{self._name} did not end within {timeout_s} s")
        self._thread = None

    def wait_until(self, deadline: Deadline) -> None:
        """Waits as ``wait`` does, until a deadline that may move meanwhile."""
        while self._thread is not None:
            if self._thread.wait(min(deadline.remaining_s(), _LOOK_EVERY_S)):
                self._thread = None
            elif deadline.passed():
                raise SaveFailed(f"{self._name} did not end {deadline.ended}")

    def take_error(self) -> Exception | None:
        """Returns the error of a function that has ended, once. None if it succeeded or still runs."""
        if self.busy:
            return None
        error, self._error = self._error, None
        return error
