"""What could not be deleted, in any store.

A deletion that fails never fails a save or a start, but it fills the storage. So each is logged once in each start,
with path, owner and error, and ``listen`` reports all of them.

This module has no threads, and any thread may call everything here. One lock guards the notes, which belong to the
process: all its checkpointers share them. ``listen``'s function is called by the thread whose deletion changed
something, without the lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator

from gracepoint.checkpoint.storage.storage_path import StoragePath

logger = logging.getLogger(__name__)

#: So many paths are kept, as a bucket may have any number of objects.
_MOST = 1000

_lock = threading.Lock()
_stays: dict[str, str] = {}  # path -> what is known of it, in the order in which it was found
_said: set[str] = set()
_listener: Callable[[list[str]], None] | None = None


def failed(path: str, error: OSError) -> None:
    """Notes that ``path`` could not be deleted."""
    message = f"{path} cannot be deleted: {error}{_owner(path, error)}"
    with _lock:
        is_new = path not in _stays and len(_stays) < _MOST
        is_unsaid = path not in _said and len(_said) < _MOST
        if is_new:
            _stays[path] = message
        if is_unsaid:
            _said.add(path)
    if is_unsaid:
        logger.warning("%s", message)
    if is_new:
        _report()


def gone(path: str) -> None:
    """Notes that ``path`` is deleted."""
    if path in _stays:
        with _lock:
            _stays.pop(path, None)
        _report()


def recheck(exists: Callable[[str], bool]) -> None:
    """Forgets what is not there any more, as somebody else has deleted it."""
    for path in list(_stays):
        if not exists(path):
            gone(path)


@contextlib.contextmanager
def deleting(path: object) -> Iterator[None]:
    """The block deletes ``path``. An ``OSError`` is noted, not raised. What is not there counts as deleted."""
    try:
        yield
    except FileNotFoundError:
        gone(str(path))
    except OSError as error:
        failed(str(path), error)
    else:
        gone(str(path))


def delete_folder(folder: StoragePath) -> None:
    """Deletes a folder and everything in it. Raises no ``OSError``: what stays is noted."""
    with deleting(folder):
        folder.delete_folder()


def listen(listener: Callable[[list[str]], None]) -> None:
    """Has ``listener`` called with all that stays, whenever that changes, and now if anything does."""
    global _listener
    _listener = listener
    if _stays:
        _report()


def end() -> None:
    """Forgets everything, the listener too: what comes is another start."""
    global _listener
    with _lock:
        _listener = None
        _stays.clear()
        _said.clear()


def _report() -> None:
    with _lock:
        stays, listener = list(_stays.values()), _listener
    if listener is not None:
        listener(stays)


def _owner(path: str, error: OSError) -> str:
    """Returns who owns what stays, as text, if it is in the local file system."""
    named = error.filename if isinstance(error.filename, str) else path
    if not named.startswith("/"):
        return ""
    owners = [
        f"{relation} {_of(status)}"
        for relation, place in (("it belongs to", named), ("its folder to", os.path.dirname(named)))
        if (status := _stat(place)) is not None
    ]
    return f" ({', '.join([*owners, f'this process is {_user(os.geteuid())}'])})"


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _of(status: os.stat_result) -> str:
    return f"{_user(status.st_uid)}, group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


def _user(uid: int) -> str:
    try:
        import pwd  # not on all systems

        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except (ImportError, KeyError):
        return f"user {uid}"
