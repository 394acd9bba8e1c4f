"""One function at a time on a thread of its own."""

from __future__ import annotations

import sys

from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.errors import SaveFailed


def test_a_function_that_exits_has_failed() -> None:
    thread = BackgroundThread()
    thread.start("the save of step 3", lambda: sys.exit(3))
    thread.wait(20)
    error = thread.take_error()
    assert isinstance(error, SaveFailed)
    assert "the save of step 3 was ended by SystemExit(3)" in str(error)
