"""One function at a time on a thread of its own."""

from __future__ import annotations

import sys
import threading

from gracepoint.errors import SaveFailed
from gracepoint.threads import BackgroundThread, DaemonThread


def test_a_function_that_exits_has_failed() -> None:
    thread = BackgroundThread()
    thread.start("the save of step 3", lambda: sys.exit(3))
    thread.wait(20)
    error = thread.take_error()
    assert isinstance(error, SaveFailed)
    assert "the save of step 3 was ended by SystemExit(3)" in str(error)


def test_the_thread_may_be_asked_for_while_a_wait_ends() -> None:
    class Waited(BackgroundThread):
        """Its owner's wait ends right after any read of the thread."""

        seen: DaemonThread | None = None

        @property
        def _thread(self) -> DaemonThread | None:
            seen, self.seen = self.seen, None
            return seen

        @_thread.setter
        def _thread(self, thread: DaemonThread | None) -> None:
            self.seen = thread

    waited, over = Waited(), threading.Event()

    def save() -> None:
        over.wait(20)

    for asked in ("busy", "thread_id"):
        waited.start("a save", save)
        assert getattr(waited, asked)
        assert not getattr(waited, asked)
    over.set()
