"""What a worker process still does once its trainer has died, after the calls that were handed over.

A call registers a function with ``when_orphaned``. The worker's main thread runs calls and the functions. Any thread
may ask ``trainer_has_died``.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_last: dict[str, Callable[[], object]] = {}
_died = threading.Event()


def when_orphaned(name: str, function: Callable[[], object]) -> None:
    """Has the worker call ``function`` if its trainer dies, in place of the function that had this name before."""
    _last[name] = function


def run_last() -> None:
    """Calls the functions that calls have registered. An error of one is logged, and the others are called."""
    for name, function in _last.items():
        try:
            function()
        except Exception as error:
            logger.error("what was to follow the death of the trainer failed: %s: %s", name, error, exc_info=error)


def is_orphan(connection: socket.socket, trainer: int | None) -> bool:
    """Returns whether the trainer has died, or has closed the connection in both directions.

    Args:
        connection: The socket to the trainer. A trainer that only says that no more calls come still reads from it.
        trainer: A file descriptor that is readable once the trainer has ended. None: it has ended already, or cannot be
            observed from here.
    """
    return _poll(connection, trainer, 0)


def wait_until_orphan(connection: socket.socket, trainer: int | None) -> None:
    """Returns when ``is_orphan`` is true. Waits as long as the trainer lives."""
    _poll(connection, trainer, None)
    _died.set()


def trainer_has_died() -> bool:
    """Returns whether ``wait_until_orphan`` has returned in this process."""
    return _died.is_set()


def _poll(connection: socket.socket, trainer: int | None, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # only what is always reported: POLLHUP once both directions are closed
    if trainer is not None:
        poll.register(trainer, select.POLLIN)
    return bool(poll.poll(timeout_ms))
