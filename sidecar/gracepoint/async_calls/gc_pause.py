"""Pauses Python's garbage collection while bytes are copied.

A collection that starts in the middle of a transfer visits every object of the training process and holds the global
interpreter lock meanwhile. Any thread may use ``gc_paused``; the module counts its users under a lock.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection inside the block. May be nested, and used by several threads at once.

    Collection is enabled again when the last user leaves, if it was enabled when the first one entered.
    """
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()
