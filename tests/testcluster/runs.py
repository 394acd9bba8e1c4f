"""The clusters on this machine: what is written down of each, and how it is removed whoever made it.

A cluster has a folder in the cache with all its files and a record. Its processes are found by the name of
its machines, its cgroups and its network device by names made from its id, so it can be removed by any
process at any time, also after its maker was killed. A cluster that belongs to a process has a guardian:
another process that waits for the end of the first one and removes the cluster then.

Processes: the guardian, which ends when its cluster's folder is gone. Threads: none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import cache, cgroups
from tests.testcluster.api import ClusterError
from tests.testcluster.network import Network
from tests.testcluster.sandbox import Sandbox, detached, processes
from tests.testcluster.shell import run, say, wait_until

DEFAULT_NAME = "default"
_MACHINE = re.compile(r"gracepoint-([0-9a-f]+)/[a-z0-9-]+$")


@dataclass(frozen=True)
class Record:
    """What is written down of a cluster.

    Attributes:
        name: The cluster's name.
        cluster_id: Its folder's name, and a part of the names of everything that it has elsewhere.
        nodes: How many nodes it began with.
        subnet: The addresses of its machines.
        owner: The process that it ends with, as its id and its start time, or nothing.
    """

    name: str
    cluster_id: str
    nodes: int
    subnet: str
    owner: tuple[int, int] | None

    @property
    def folder(self) -> Path:
        """Where everything that the cluster writes lies."""
        return cache.folder("clusters") / self.cluster_id

    @property
    def logs(self) -> Path:
        """Logs of all components."""
        return self.folder / "logs"

    @property
    def cgroup(self) -> str:
        """The cgroup above those of all its pods."""
        return f"/gracepoint-{self.cluster_id}"

    @property
    def network(self) -> Network:
        """Its network."""
        return Network(self.subnet, f"gp-{self.cluster_id}")

    def sandbox(self, machine: str) -> Sandbox:
        """The namespaces of one of its machines."""
        return Sandbox(f"gracepoint-{self.cluster_id}/{machine}")

    def save(self) -> None:
        """Write it down."""
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.folder / "cluster.json"
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        scratch.rename(path)


def records() -> list[Record]:
    """All clusters that are written down."""
    found = []
    for path in sorted(cache.folder("clusters").glob("*/cluster.json")):
        with contextlib.suppress(FileNotFoundError):  # it may be removed meanwhile
            data = json.loads(path.read_text())
            owner = data.pop("owner")
            found.append(Record(**data, owner=(owner[0], owner[1]) if owner else None))
    return found


def find(name: str) -> Record | None:
    """What is written down of the cluster of that name, if there is one."""
    return next((record for record in records() if record.name == name), None)


def remove(record: Record) -> None:
    """Remove a cluster and every trace of it; what is already gone is no error.

    Raises:
        ClusterError: Something would not go.
    """
    record.sandbox("control-plane").kill()
    for name in machines(record.cluster_id):
        Sandbox(name).kill()
    device = Path("/sys/class/net") / record.network.device
    if device.exists():  # only when the cluster's own end of it was never made: it goes with its namespace
        try:
            wait_until(f"network device {device.name} to go", lambda: not device.exists(), timeout_s=3, every_s=0.05)
        except ClusterError:
            run(["ip", "link", "delete", device.name])
    cgroups.remove(record.cgroup)
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        if (place := mount.split()[1]).startswith(f"{record.folder}/"):  # of a test that was killed
            run(["umount", "--lazy", place], check=False)
    shutil.rmtree(record.folder, ignore_errors=True)
    if record.folder.exists():
        raise ClusterError(f"cannot remove {record.folder}")


def machines(cluster_id: str) -> list[str]:
    """Names of the machines of a cluster that run."""
    return [name for each, name in _all_machines() if each == cluster_id]


def sweep() -> None:
    """Remove clusters whose owner is gone, or whose machines are, or of which nothing is written down any more."""
    with cache.lock("clusters", timeout_s=300):
        for record in records():
            abandoned = record.owner is not None and record.owner != _identity(record.owner[0])
            if abandoned or record.sandbox("control-plane").pid is None:
                say(f"removing what is left of cluster {record.name}")
                remove(record)
        known = {record.cluster_id for record in records()}
        for cluster_id in {cluster_id for cluster_id, _ in _all_machines()} - known:
            say(f"removing the machines of cluster {cluster_id}, whose folder is gone")
            remove(Record("", cluster_id, 0, "", None))


def this_process() -> tuple[int, int]:
    """The present process as an owner."""
    identity = _identity(os.getpid())
    if identity is None:
        raise ClusterError("/proc is not mounted")
    return identity


def start_guardian(record: Record) -> None:
    """Start the process that removes a cluster when its owner has ended, however that came about."""
    argv = ["setsid", "--fork", sys.executable, "-m", "tests.testcluster", "guard", record.cluster_id]
    env = {"TESTCLUSTER_CACHE": str(cache.folder())}
    detached(argv, record.logs / "guardian.log", cwd=cache.REPOSITORY, env=env)


def release(record: Record) -> Record:
    """Let a cluster live on without its owner; its guardian leaves."""
    free = dataclasses.replace(record, owner=None)
    free.save()
    return free


def guard(cluster_id: str) -> None:
    """Be the guardian of a cluster until it is gone."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # whoever is stopped by them, this one has to clean up after
    while record := _owned(cluster_id):
        if _wait_for_end(record.owner, limit_s=0.5):
            record = _owned(cluster_id)  # the last thing that it did may have been to release the cluster
            if record:
                remove(record)
            return


def _owned(cluster_id: str) -> Record | None:
    return next((each for each in records() if each.cluster_id == cluster_id and each.owner), None)


def _wait_for_end(owner: tuple[int, int] | None, *, limit_s: float) -> bool:
    """Wait a while for a process to end; returns whether it has."""
    if owner is None or owner != _identity(owner[0]):
        return True
    try:
        handle = os.pidfd_open(owner[0])
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))
    finally:
        os.close(handle)


def _all_machines() -> list[tuple[str, str]]:
    """Cluster ids and names of all machines whose init program is from this cache."""
    found = []
    for _, argv in processes():
        if (
            len(argv) == 2
            and Path(argv[0]).is_relative_to(cache.folder("parts"))
            and (match := _MACHINE.match(argv[1]))
        ):
            found.append((match.group(1), argv[1]))
    return found


def _identity(pid: int) -> tuple[int, int] | None:
    """A process's id and start time, which together never mean another process."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    return pid, int(stat.rpartition(")")[2].split()[19])
