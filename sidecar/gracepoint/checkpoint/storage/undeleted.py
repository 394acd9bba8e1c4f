"""What could not be deleted, and why. A deletion that fails never fails a save or a start, but it fills the storage.

So each is logged once in each start, with path, owner and error, and ``listen`` reports all of them. Any
thread may call everything here. One lock guards the state, which belongs to the process: all its checkpointers share
it. ``listen``'s function is called by the thread whose deletion changed something, without the lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

#: So many paths are kept, as a bucket may have any number of objects.
_MOST = 1000

_lock = threading.Lock()
_stays: dict[str, str] = {}  # path -> what is known of it, in the order in which it was found
_said: set[str] = set()
_listener: Callable[[list[str]], None] | None = None


def failed(path: str, error: OSError) -> None:
    """Notes that ``path`` could not be deleted."""
    told = f"{path} cannot be deleted: {error}{_owner(path, error)}"
    with _lock:
        is_new = path not in _stays and len(_stays) < _MOST
        is_unsaid = path not in _said and len(_said) < _MOST
        if is_new:
            _stays[path] = told
        if is_unsaid:
            _said.add(path)
    if is_unsaid:
        logger.warning("%s", told)
    if is_new:
        _tell()


def gone(path: str) -> None:
    """Notes that ``path`` is deleted."""
    if path in _stays:
        with _lock:
            _stays.pop(path, None)
        _tell()


def recheck(exists: Callable[[str], bool]) -> None:
    """Forgets what is not there any more, as somebody else has deleted it."""
    for path in list(_stays):
        if not exists(path):
            gone(path)


@contextlib.contextmanager
def telling(path: object) -> Iterator[None]:
    """The block deletes ``path``. An ``OSError`` is noted, not raised. What is not there counts as deleted."""
    try:
        yield
    except FileNotFoundError:
        gone(str(path))
    except OSError as error:
        failed(str(path), error)
    else:
        gone(str(path))


def listen(listener: Callable[[list[str]], None]) -> None:
    """Has ``listener`` called with all that stays, whenever that changes, and now if anything does."""
    global _listener
    _listener = listener
    if _stays:
        _tell()


def end() -> None:
    """Forgets everything, the listener too: what comes is another start."""
    global _listener
    with _lock:
        _listener = None
        _stays.clear()
        _said.clear()


def _tell() -> None:
    with _lock:
        stays, listener = list(_stays.values()), _listener
    if listener is not None:
        listener(stays)


def _owner(path: str, error: OSError) -> str:
    """Returns who owns what stays, in words, if it is in the local file system."""
    named = error.filename if isinstance(error.filename, str) else path
    if not named.startswith("/"):
        return ""
    said = [
        f"{what} {_of(found)}"
        for what, place in (("it belongs to", named), ("its folder to", os.path.dirname(named)))
        if (found := _stat(place)) is not None
    ]
    return f" ({', '.join([*said, f'this process is {_user(os.geteuid())}'])})"


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _of(found: os.stat_result) -> str:
    return f"{_user(found.st_uid)}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"


def _user(uid: int) -> str:
    try:
        import pwd  # not on all systems

        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except (ImportError, KeyError):
        return f"user {uid}"
