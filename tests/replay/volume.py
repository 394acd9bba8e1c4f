"""A file system of its own for the checkpoints of the replay's jobs: to fill it, or to hold it up, harms nobody else.

Processes: ``mount``, ``umount``, ``findmnt``, ``fsfreeze`` and a shell, each to its end. Threads: none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.limits import fill, small_disk
from tests.testcluster.addons import CONTROL_PLANE
from tests.testcluster.api import Cluster
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import run

_SIZE_BYTES = 512 << 20
#: Of each second in which the volume is slow, it takes no write for so long.
_HELD_S = 0.9


@contextlib.contextmanager
def mounted(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Mounts a volume at this folder, here and on each node. On a cluster of others, the folder stays what it is.

    Raises:
        ClusterError: It could not be mounted on a node.
    """
    if not isinstance(cluster, LocalCluster):
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()  # of a replay before on the same cluster
    with small_disk(folder, _SIZE_BYTES):
        device = run(["findmnt", "--noheadings", "--output=SOURCE", folder]).stdout.strip()
        # A node that comes later is made inside of the control plane's machine, and has its mounts.
        machines = [cluster.record.sandbox(name) for name in (CONTROL_PLANE, *cluster.nodes)]
        try:
            for machine in machines:
                machine.run(["mount", device, folder])
            yield
        finally:
            for machine in machines:
                if machine.pid is not None:
                    machine.run(["umount", "--lazy", folder], check=False)


@contextlib.contextmanager
def filled(volume: Path) -> Iterator[None]:
    """Leaves no room on a volume, for as long as the ``with`` statement lasts."""
    _require_volume(volume)
    filler = fill(volume)
    try:
        yield
    finally:
        filler.unlink()


def slow(volume: Path, seconds: int) -> None:
    """Holds up what is written to a volume for nine tenths of each of so many seconds."""
    _require_volume(volume)
    held = f'fsfreeze --freeze "$0"; sleep {_HELD_S}; fsfreeze --unfreeze "$0"; sleep {1 - _HELD_S:.1f}'
    try:
        run(["sh", "-euc", f"for second in $(seq {seconds}); do {held}; done", volume], timeout_s=4 * seconds)
    finally:
        run(["fsfreeze", "--unfreeze", volume], check=False)


def _require_volume(volume: Path) -> None:
    """Raises ``AssertionError`` if what is done to it would reach further."""
    assert os.path.ismount(volume), f"expected a volume of its own at {volume}"
