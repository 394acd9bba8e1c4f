"""File systems for tests: of a kind, made in a file and mounted by a loop device. They can lose their power.

Needs root, loop devices, and the kernel's and the machine's programs for the kind (packages xfsprogs, btrfs-progs).

Processes: ``mkfs``, ``mount`` and ``umount``, each to its end. Threads: none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.testcluster.shell import run, wait_until

#: The kinds, with the arguments of ``mkfs`` besides the file.
_MKFS = {"ext4": ["-q", "-F"], "xfs": ["-q", "-f"], "btrfs": ["-q", "-f"]}
#: An XFS cannot be smaller than 300 MiB. The file is sparse.
_SIZE_BYTES = 512 << 20
#: From the kernel's ``ext4.h`` and ``xfs_fs.h``: _IOR('X', 125, __u32), and "end without writing the log".
_SHUTDOWN, _NO_LOG = 0x8004587D, 2
_UNUSED_S = 30.0


def why_not(kind: str) -> str:
    """Why there can be none on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        return f"the kernel has no {kind}"
    return "" if shutil.which(f"mkfs.{kind}") else f"no mkfs.{kind}; run: make mount-tools"


class LoopMount:
    """A mounted file system.

    Attributes:
        top: Where it is mounted.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._image = folder / f"{kind}.image"
        self.top = folder / kind
        self.top.mkdir()
        with self._image.open("wb") as image:
            image.truncate(_SIZE_BYTES)
        run([f"mkfs.{kind}", *_MKFS[kind], self._image])
        self._mount()

    def lose_power(self) -> None:
        """Ends the file system at once, as if the machine's power was lost: only what had left its caches is kept.

        Everything that uses it fails from now on with EIO. ``power_on`` mounts it again.

        Raises:
            OSError: The kind has no such call: it is one of ext4 and XFS that has.
        """
        descriptor = os.open(self.top, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG))
        finally:
            os.close(descriptor)

    def power_on(self) -> None:
        """Mounts the file system again; the kernel recovers it. Waits until nothing uses the lost one."""
        wait_until(
            *("the lost file system to be unused", self._unmounted), timeout_s=_UNUSED_S, every_s=0.02, hint=self._users
        )
        self._mount()

    def close(self) -> None:
        """Unmounts it."""
        run(["umount", "--lazy", self.top], check=False)
        self._image.unlink()

    def _mount(self) -> None:
        run(["mount", "-o", "loop", "-t", self._kind, self._image, self.top])

    def _unmounted(self) -> bool:
        run(["umount", self.top], check=False)  # a lost file system does not even say whether it is mounted
        # The kernel detaches the loop device a little later.
        return not run(["losetup", "--associated", self._image]).stdout

    def _users(self) -> str:
        """Names processes with the mount: each container that starts beside the test gets a copy of all mounts."""
        found = []
        for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
            with contextlib.suppress(OSError):  # it has ended
                if f" {self.top} " in mounts.read_text():
                    found.append(f"{mounts.parent.name} ({(mounts.parent / 'comm').read_text().strip()})")
        return f"; processes whose mounts have it: {', '.join(found) or 'none'}"


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[LoopMount]:
    """Makes and mounts an empty file system below ``folder``, until the end of the ``with`` statement.

    Args:
        kind: ``ext4``, ``xfs`` or ``btrfs``.
        folder: Where its file and its mount go.
    """
    mount = LoopMount(kind, folder)
    try:
        yield mount
    finally:
        mount.close()


@contextlib.contextmanager
def read_only(folder: Path, place: Path) -> Iterator[Path]:
    """Mounts ``folder`` at ``place`` once more, so that nothing can be written there."""
    place.mkdir()
    run(["mount", "--bind", folder, place])
    try:
        run(["mount", "-o", "remount,bind,ro", place])
        yield place
    finally:
        run(["umount", place])
