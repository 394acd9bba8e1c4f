"""Where ``benchmarks.emergency_save`` saves to: a disk, memory, and a disk that is slow on purpose.

The slow one is a file system in a file on the disk, on a loop device whose writes the kernel itself holds to a rate
(``blkio.throttle.write_bps_device`` of the root control group, so that what is written back from the page cache is held
to it too). That takes root and control groups of version 1; where they are not, there is no such figure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_TIMEOUT_S = 60.0


def cannot_shape() -> str | None:
    """Why there can be no slow disk here; None if there can."""
    if os.geteuid() != 0:
        return "it takes root to make a loop device"
    if not os.access(_THROTTLE, os.W_OK):
        return f"{_THROTTLE} cannot be written: control groups of version 1 have it"
    missing = [name for name in ("losetup", "mkfs.ext4", "mount", "lsblk") if shutil.which(name) is None]
    return f"there is no {missing[0]}" if missing else None


@contextlib.contextmanager
def shaped(directory: Path, size_bytes: int, bytes_per_s: int) -> Iterator[Path]:
    """Yields a folder on an ext4 of ``size_bytes`` whose writes are held to ``bytes_per_s``."""
    with tempfile.TemporaryDirectory(prefix="shaped-", dir=directory) as top, contextlib.ExitStack() as undo:
        image, folder = Path(top, "image"), Path(top, "mounted")
        folder.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
        undo.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        _run("mount", device, str(folder))
        undo.callback(_run, "umount", str(folder))
        number = _run("lsblk", "--nodeps", "--noheadings", "--output", "MAJ:MIN", device)
        undo.callback(_THROTTLE.write_text, f"{number} 0\n")
        _THROTTLE.write_text(f"{number} {bytes_per_s}\n")
        yield folder


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
