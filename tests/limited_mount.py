"""A folder mounted by FUSE, without some of what file systems have: hard links, or renames of folders.

    python -m tests.limited_mount BACKING MOUNT LACKS SUBTYPE SOURCE

LACKS is ``links`` or ``links,renames``. Needs root, /dev/fuse and libfuse3 (package fuse3).

Processes: one, which serves the mount, from ``mounted`` to the end of the ``with`` statement. Threads: none; it serves
one request at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.testcluster.shell import wait_until

_REPOSITORY = Path(__file__).parents[1]
_READY_S, _ENDED_S = 20.0, 10.0


def why_not() -> str:
    """Why there can be none on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not Path("/dev/fuse").exists():
        return "the kernel has no FUSE"
    return "" if shutil.which("fusermount3") else "no fusermount3; run: make system"


@contextlib.contextmanager
def mounted(folder: Path, *lacks: str, subtype: str = "limited", source: str = "limited") -> Iterator[Path]:
    """Mounts an empty folder; yields where.

    Args:
        folder: An empty folder for what is stored, and the mount.
        lacks: ``links``, ``renames`` (of folders).
        subtype: The type of the mount is ``fuse.`` and this.
        source: What the mount says that it is of.
    """
    backing, mount = folder / "backing", folder / "mount"
    backing.mkdir()
    mount.mkdir()
    argv = [sys.executable, "-m", "tests.limited_mount", str(backing), str(mount), ",".join(lacks), subtype, source]
    with subprocess.Popen(argv, cwd=_REPOSITORY, start_new_session=True) as process:
        try:
            wait_until("the mount", lambda: os.path.ismount(mount) or process.poll() is not None, timeout_s=_READY_S)
            assert process.poll() is None, f"the file system ended with {process.returncode}"
            yield mount
        finally:
            subprocess.run(["umount", "--lazy", str(mount)], check=False)
            try:
                process.wait(_ENDED_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main(backing: str, mount: str, lacks: str, subtype: str, source: str) -> None:
    """Serves the mount until it is unmounted."""
    import mfusepy

    def refuse(*_: Any) -> None:
        raise mfusepy.FuseOSError(errno.EPERM)

    class Limited(mfusepy.Operations):  # type: ignore[misc]
        """Passes on what it does not refuse."""

        use_ns = True

        def _at(self, path: str) -> str:
            return os.path.join(backing, path.lstrip("/"))

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            found = os.lstat(self._at(path))
            names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size")
            times = {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {**{name: getattr(found, name) for name in names}, **times}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", *os.listdir(self._at(path))]

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(self._at(path), mode)

        def rmdir(self, path: str) -> None:
            os.rmdir(self._at(path))

        def unlink(self, path: str) -> None:
            os.unlink(self._at(path))

        def rename(self, old: str, new: str, flags: int = 0) -> None:
            if "renames" in lacks and os.path.isdir(self._at(old)):
                raise mfusepy.FuseOSError(errno.ENOSYS)
            os.rename(self._at(old), self._at(new))

        def link(self, target: str, link: str) -> None:
            if "links" in lacks:
                refuse()
            os.link(self._at(link), self._at(target))

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(self._at(path), flags & ~os.O_DIRECT)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(self._at(path), length)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            os.fsync(fh)

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(self._at(path), mode)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(self._at(path), ns=times)

    mfusepy.FUSE(Limited(), mount, foreground=True, nothreads=True, subtype=subtype, fsname=source)


if __name__ == "__main__":
    main(*sys.argv[1:])
