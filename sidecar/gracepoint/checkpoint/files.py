"""What the engine does with files itself: small ones durably, folders synced, sizes checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gracepoint.errors import CheckpointCorrupt

_LOOK_EVERY_S = 0.1


def write_durably(path: Path, data: bytes) -> None:
    """Writes ``path`` as a whole: never seen half, on the disk on return (its folder's entry included).

    Several processes may write the same path with equal contents at once.
    """
    partial = path.with_name(f".{path.name}.partial-{os.uname().nodename}-{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folders([path.parent])


def make_folders(path: Path) -> None:
    """Makes ``path`` and the folders above it that are missing, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    sync_folders(folder.parent for folder in missing)


def sync_folders(folders: Iterable[Path]) -> None:
    """Makes the entries of ``folders`` durable."""
    for folder in sorted(set(folders)):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def folders_up_to(path: Path, top: Path) -> Iterable[Path]:
    """Yields the folders above ``path``, from its own up to and with ``top``."""
    for folder in path.parents:
        yield folder
        if folder == top:
            return
    raise ValueError(f"{path} is not below {top}")


def appears(path: Path, *, within_s: float, sleep: Callable[[float], object]) -> bool:
    """Returns whether ``path`` is there, or comes to be in about ``within_s``."""
    for _ in range(max(1, round(within_s / _LOOK_EVERY_S))):
        if os.access(path, os.F_OK):
            return True
        sleep(_LOOK_EVERY_S)
    return False


def check_size(path: Path, size_bytes: int) -> None:
    """Raises CheckpointCorrupt, naming ``path``, if it is missing or has another size."""
    try:
        found_bytes = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing") from None
    if found_bytes != size_bytes:
        raise CheckpointCorrupt(f"{path} has {found_bytes} bytes, expected {size_bytes}")
