"""Waits for a save under way when the interpreter ends. Otherwise its thread would be killed without a message."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

from gracepoint.errors import GracepointError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """An object that ``AtExit`` closes."""

    def close(self) -> None:
        """Waits for the save under way. In a forked child, which inherits the call, it does nothing."""


class AtExit:
    """Closes ``what`` when the interpreter ends, unless it no longer exists or ``forget`` was called."""

    def __init__(self, what: Closable) -> None:
        self._what = weakref.ref(what)
        atexit.register(self._close)

    def forget(self) -> None:
        """Cancels the call at the end of the interpreter."""
        atexit.unregister(self._close)

    def _close(self) -> None:
        what = self._what()
        if what is None:
            return
        try:
            what.close()
        except GracepointError as error:
            logger.error("the last save failed: %s", error)
