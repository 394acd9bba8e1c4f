"""Where things are kept between runs, and who may write there.

Everything lies in one folder that git ignores. A file lock makes processes that want to build the same
thing wait for each other; the kernel drops it when its holder ends, however it ends. Starts no thread and
no process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.testcluster.api import ClusterError
from tests.testcluster.shell import say

REPOSITORY = Path(__file__).resolve().parents[2]


def folder(*names: str) -> Path:
    """A folder in the cache, made if need be. ``TESTCLUSTER_CACHE`` moves the cache elsewhere."""
    root = os.environ.get("TESTCLUSTER_CACHE") or REPOSITORY / ".cache" / "gracepoint"
    path = Path(root).resolve().joinpath(*names)
    path.mkdir(parents=True, exist_ok=True)
    return path


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Have ``path`` made if it is not there, by one process; others that want it meanwhile wait for that.

    Args:
        path: A file or folder in the cache, which is there as a whole or not at all.
        make: Writes it at the path that it is given, in the same folder and with the same ending.
    """
    if path.exists():
        return path
    with lock(f"{path.parent.name}-{path.name}"):
        if not path.exists():
            scratch = path.with_name(f".{path.name}")
            _remove(scratch)  # of a process that was killed
            try:
                make(scratch)
                scratch.rename(path)
            finally:
                _remove(scratch)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest(*values: str | bytes) -> str:
    """A short key of values, for a name in the cache."""
    total = hashlib.sha256()
    for value in values:
        data = value.encode() if isinstance(value, str) else value
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]


@contextlib.contextmanager
def lock(name: str, *, timeout_s: float = 3600) -> Iterator[None]:
    """Hold the cache's lock of that name.

    Raises:
        ClusterError: Another process has held it for ``timeout_s``.
    """
    path = folder("locks") / name
    with path.open("w") as handle:
        deadline = time.monotonic() + timeout_s
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"waited {timeout_s:g} s for the lock {path}, which another process holds"
                    ) from None
                if not told:
                    say(f"waiting for another process that holds {path}")
                    told = True
                time.sleep(0.2)
        yield
