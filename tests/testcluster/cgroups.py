"""The cgroups of a cluster's pods: one subtree of its own in every hierarchy.

Starts no thread and no process.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path

from tests.testcluster.api import ClusterError
from tests.testcluster.shell import wait_until
from tests.testcluster.system import cgroup_roots


def create(path: str) -> None:
    """Make a cgroup, such as ``/cluster/node``, in every hierarchy, and let its children be limited."""
    for root in cgroup_roots():
        place = root
        for name in path.strip("/").split("/"):
            _delegate(place)
            place = place / name
            place.mkdir(exist_ok=True)
            _inherit_cpuset(place)
        _delegate(place)


def remove(path: str, *, timeout_s: float = 10) -> None:
    """Remove a cgroup and all below it, whose processes have just been killed.

    Raises:
        ClusterError: A process is in it still.
    """
    for root in cgroup_roots():
        top = root / path.strip("/")
        if top.exists():
            wait_until(f"the processes of {top} to be gone", partial(_try_remove, top), timeout_s=timeout_s)


def left(path: str) -> list[Path]:
    """The hierarchies' folders of a cgroup that exist."""
    return [root / path.strip("/") for root in cgroup_roots() if (root / path.strip("/")).exists()]


def _try_remove(top: Path) -> bool:
    for place, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(place)
        except FileNotFoundError:
            continue  # the kernel or another process removed it meanwhile
        except OSError as error:
            raise ClusterError(str(error)) from error
    return not top.exists()


def _delegate(place: Path) -> None:
    """With cgroup v2, a parent says which controllers its children have."""
    control = place / "cgroup.subtree_control"
    if control.exists():
        for controller in (place / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                control.write_text(f"+{controller}")


def _inherit_cpuset(place: Path) -> None:
    """With cgroup v1, a new cpuset is empty, and nothing can run in it."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        own = place / name
        with contextlib.suppress(OSError):
            if own.exists() and not own.read_text().strip():
                own.write_text((place.parent / name).read_text())
