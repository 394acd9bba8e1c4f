"""How much room a file system has, and what an error says that storage had none. No state, and no threads.

Object stores tell only by an error that a quota is used up.
"""

from __future__ import annotations

import dataclasses
import errno
import os

from gracepoint.checkpoint.storage.storage_path import StoragePath

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REASONS = {
    errno.ENOSPC: "the file system is full: delete something, make it larger, or keep fewer steps",
    errno.EDQUOT: "a quota is used up: raise it, delete something, or keep fewer steps",
    errno.EFBIG: "a file may not be so large here: see `ulimit -f` and the limits of the file system, or write smaller "
    "chunks",
    errno.EROFS: "the file system is mounted read-only: was that meant, or has it had an error?",
}
#: TensorStore's errors have no number.
_WORDS = {os.strerror(number): number for number in _REASONS}


@dataclasses.dataclass(frozen=True)
class Room:
    """What a file system has left for this user.

    Attributes:
        free_bytes: Bytes.
        free_files: Files. None if the file system does not count them.
        total_bytes: Bytes that it has in all.
    """

    free_bytes: int
    free_files: int | None
    total_bytes: int


def at(path: StoragePath) -> Room | None:
    """Returns the room of the file system of ``path``, or of its nearest folder that exists. None: it is not known."""
    try:
        place = path.backend.local_path(path.key)
    except TypeError:
        return None
    while True:
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            place = os.path.dirname(place)
        except OSError:
            return None
        else:
            files = found.f_favail if found.f_files else None
            return Room(found.f_bavail * found.f_frsize, files, found.f_blocks * found.f_frsize)


def is_full(error: BaseException) -> bool:
    """Returns whether ``error`` says that storage has no room left, or a quota none."""
    return _number(error) in _FULL


def knows(error: BaseException) -> bool:
    """Returns whether ``explained`` has more to say of ``error`` than its own text."""
    return _number(error) is not None


def explained(error: BaseException, path: StoragePath, needed_bytes: int | None = None) -> str:
    """Returns the text of ``error``. If storage has no room or cannot be written to, with what is known of it.

    Args:
        error: The error.
        path: What was written.
        needed_bytes: Bytes of all that was to be written. None: it is not known.
    """
    number = _number(error)
    if number is None:
        return str(error)
    found = at(path)
    said = [f"{error}; {_REASONS[number]}. {path}"]
    if needed_bytes is not None:
        said.append(f"{needed_bytes} bytes are needed for the whole save, before any compression")
    if found is not None:
        said.append(f"{found.free_bytes} of {found.total_bytes} bytes are free there")
        if found.free_files is not None and found.free_files < _FEW_FILES:
            said.append(f"only {found.free_files} more files can be made")
    return ", ".join(said) if len(said) == 1 else f"{said[0]}: {', '.join(said[1:])}"


#: Fewer free files than this are worth a word.
_FEW_FILES = 1000


def _number(error: BaseException | None) -> int | None:
    """Returns what an error, or one that caused it, is about. None: none of what this module knows."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REASONS:
            return error.errno
        for words, number in _WORDS.items():
            if words in str(error):
                return number
        error = error.__cause__
    return None
