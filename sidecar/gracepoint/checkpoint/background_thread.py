"""At most one function at a time on a thread of its own.

One thread owns this object and starts functions. The thread of a function ends with it; its outcome is read after
that, by ``wait`` or ``take_error``. An error that nobody has read is logged when this object goes. The thread is a
daemon: a save that hangs never keeps a process that wants to leave.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05


class BackgroundThread:
    """Runs functions one after the other; an error waits until somebody asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._name = ""
        self._error: Exception | None = None  # written by the thread, read once it has ended
        self._failed = ""  # the name of what ended with it

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Starts ``function``; nothing else may be running.

        Raises:
            RuntimeError: The system has no thread for it, or Python ends: nothing is started.
        """
        assert not self.busy

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - kept for the training thread
                self._error, self._failed = error, name
            except BaseException as error:  # noqa: BLE001 - a callback that calls sys.exit() must not count as success
                ended = SaveFailed(f"{name} was ended by {error!r}")
                ended.__cause__ = error
                self._error, self._failed = ended, name

        thread = threading.Thread(target=run, name=f"gracepoint: {name}", daemon=True)
        thread.start()
        self._name, self._thread = name, thread

    def __del__(self) -> None:
        # Also in the thread of the function, which keeps this object until it ends.
        if self._error is not None:
            logger.error("%s failed, and nobody waited for it or asked: %s", self._failed, self._error)

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Waits until nothing runs; ``take_error`` then tells how it ended.

        Raises:
            SaveFailed: It still ran after ``timeout_s``.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SaveFailed(f"{self._name} did not end within {timeout_s} s")
        self._thread = None

    def wait_until(self, deadline: Deadline) -> None:
        """As ``wait``, until a deadline that may move meanwhile."""
        while self._thread is not None:
            self._thread.join(min(deadline.remaining_s(), _LOOK_EVERY_S))
            if not self._thread.is_alive():
                self._thread = None
            elif deadline.passed():
                raise SaveFailed(f"{self._name} did not end {deadline.ended}")

    def take_error(self) -> Exception | None:
        """Returns the error of a function that has ended, once; None if it went well or still runs."""
        if self.busy:
            return None
        error, self._error = self._error, None
        return error
