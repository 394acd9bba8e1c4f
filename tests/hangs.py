"""A pytest plugin: a test that hangs prints the stacks of all threads, also in a worker of pytest-xdist.

pytest-timeout prints them to standard output and ends the process; a worker's standard output is discarded.

Threads: the timer of each test, which the end of the test cancels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import pytest_timeout

#: Called before the process ends; each prints more about the test that hangs.
show_more: list[Callable[[pytest.Config], None]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    if settings.method != "thread":
        return None
    timer = threading.Timer(settings.timeout, _end, (item, settings))
    timer.name = f"timeout of {item.nodeid}"

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # where pytest-timeout looks for it
    timer.start()
    return True


def _end(item: Any, settings: Any) -> None:
    if pytest_timeout.is_debugging() and not settings.disable_debugger_detection:
        return
    try:
        if capture := item.config.pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture(in_=True)
        if hasattr(item.config, "workerinput"):
            os.dup2(2, 1)  # the terminal is reached by a worker's standard error alone
        for show in show_more:
            show(item.config)
    finally:
        pytest_timeout.timeout_timer(item, settings)  # ends the process
