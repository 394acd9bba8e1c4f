"""What this machine must have for the local provider, and how it gets it.

Processes: apt-get, to its end, only from ``install``. Threads: none.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import cache
from tests.testcluster.api import ClusterError
from tests.testcluster.parts import progress
from tests.testcluster.shell import run

_CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
_CNI_PLUGINS = ("ptp", "host-local", "loopback", "portmap")
_PRIVATE = ("/run", "/var/lib", "/var/log")
"""Folders of which every node has its own, so that the cache must not lie there."""


@dataclass(frozen=True)
class Need:
    """A program that must be on this machine, and the Debian and Ubuntu package that has it."""

    program: str
    package: str


_PROGRAMS = (
    Need("containerd", "containerd"),
    Need("ctr", "containerd"),
    Need("containerd-shim-runc-v2", "containerd"),
    Need("runc", "runc"),
    Need("buildah", "buildah"),
    Need("mmdebstrap", "mmdebstrap"),
    Need("iptables", "iptables"),
    Need("ip", "iproute2"),
    Need("dbus-daemon", "dbus"),
    Need("openssl", "openssl"),
    Need("unshare", "util-linux"),
    Need("nsenter", "util-linux"),
    Need("setsid", "util-linux"),
    Need("mount", "mount"),
)
_OTHER_TESTS = (Need("strace", "strace"), Need("fusermount3", "fuse3"), Need("gcc", "build-essential"))
"""What single tests need, and faults of the replay; no reason for a cluster not to run."""
_MOUNT_TESTS = (Need("mkfs.xfs", "xfsprogs"), Need("mkfs.btrfs", "btrfs-progs"), Need("s3fs", "s3fs"))
"""What ``make test-mounts`` needs besides."""
_GO_HINT = "install Go 1.21 or newer (https://go.dev/doc/install); it fetches the exact version itself"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: The thing.
        problem: What is wrong with it; empty when it is fine.
        fix: What to do about it.
        packages: Packages that mend it.
    """

    what: str
    problem: str = ""
    fix: str = ""
    packages: tuple[str, ...] = ()


def cni_folder() -> Path | None:
    """Where the CNI plugins are, or None."""
    for path in _CNI_FOLDERS:
        if all((path / plugin).exists() for plugin in _CNI_PLUGINS):
            return path
    return None


def examine() -> list[Finding]:
    """Look at everything that the local provider needs."""
    return [
        _system(),
        _root(),
        _go(),
        *_programs(),
        _cni(),
        _debian_keys(),
        _cgroups(),
        cache_place(),
        _overlay(),
    ]


def why_not_local() -> str | None:
    """Why the local provider cannot run on this machine, with the fix; None when it can."""
    problems = [finding for finding in examine() if finding.problem]
    if not problems:
        return None
    return "; ".join(f"{each.what}: {each.problem} ({each.fix})" for each in problems)


def missing_packages() -> list[str]:
    """The Debian and Ubuntu packages that would mend what is wrong, and those that other tests need."""
    others = {need.package for need in _OTHER_TESTS if not shutil.which(need.program)}
    return sorted(others | {package for finding in examine() for package in finding.packages})


def missing_mount_tools() -> list[str]:
    """The Debian and Ubuntu packages that make and mount the file systems of ``make test-mounts``."""
    return sorted({need.package for need in _MOUNT_TESTS if not shutil.which(need.program)})


def install(packages: Sequence[str]) -> None:
    """Install system packages with apt-get.

    Raises:
        ClusterError: This is no Debian or Ubuntu, or not root; the message names the packages.
    """
    if not packages:
        return
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install what these Debian packages contain: {names}")
    if os.geteuid() != 0:
        raise ClusterError(f"run as root: apt-get install --no-install-recommends {names}")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress(f"installing system packages: {names}"):
        run(["apt-get", "update"], timeout_s=300, env=env)
        # containerd and others of a node run in the test's own namespaces: no service of theirs is wanted
        run(["apt-get", "install", "--yes", "--no-install-recommends", *packages], timeout_s=900, env=env)


def cgroup_roots() -> list[Path]:
    """The top folder of every cgroup hierarchy: one with cgroup v2, one for each controller with v1."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top]
    return sorted({path.resolve() for path in top.iterdir() if (path / "cgroup.procs").exists()})


def _system() -> Finding:
    if platform.system() != "Linux":
        return Finding("operating system", f"{platform.system()} is not Linux", "use --provider existing")
    return Finding("operating system")


def _root() -> Finding:
    if os.geteuid() != 0:
        return Finding("root", "nodes are made of namespaces, mounts and cgroups, which needs root", "run as root")
    return Finding("root")


def _go() -> Finding:
    return Finding("Go") if shutil.which("go") else Finding("Go", "not found", _GO_HINT)


def _programs() -> list[Finding]:
    return [
        Finding(need.program)
        if shutil.which(need.program)
        else Finding(need.program, "not found", _apt(need.package), (need.package,))
        for need in _PROGRAMS
    ]


def _cni() -> Finding:
    if cni_folder():
        return Finding("CNI plugins")
    package = "containernetworking-plugins"
    return Finding("CNI plugins", f"not in {_join(_CNI_FOLDERS)}", _apt(package), (package,))


def _debian_keys() -> Finding:
    if Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
        return Finding("keys of the Debian archive")
    package = "debian-archive-keyring"
    return Finding("keys of the Debian archive", "not found", _apt(package), (package,))


def _cgroups() -> Finding:
    what = "cgroups"
    fix = "mount cgroups writable (in a container: run it privileged)"
    try:
        roots = cgroup_roots()
    except OSError as error:
        return Finding(what, str(error), fix)
    if not roots:
        return Finding(what, "no hierarchy under /sys/fs/cgroup", fix)
    return _check(what, fix, lambda: all(os.access(root, os.W_OK) for root in roots), "not writable")


def cache_place() -> Finding:
    """Whether nodes see the cache folder: some folders each node has for itself."""
    path = cache.folder()
    for private in _PRIVATE:
        if path.is_relative_to(private):
            return Finding("cache folder", f"{path} lies in {private}", "set TESTCLUSTER_CACHE to a folder elsewhere")
    return Finding("cache folder")


def _overlay() -> Finding:
    """Containers' file systems are overlays over folders of the cache, which not every file system can be under."""
    what = "overlay mounts in the cache folder"
    fix = "set TESTCLUSTER_CACHE to a folder on ext4, xfs or btrfs"
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return Finding(what)
    top = Path(tempfile.mkdtemp(prefix="overlay-check-", dir=cache.folder("tmp")))  # others may look at the same time
    names = {name: top / name for name in ("lower", "upper", "work", "merged")}
    for folder in names.values():
        folder.mkdir()
    options = f"lowerdir={names['lower']},upperdir={names['upper']},workdir={names['work']}"
    mount = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, str(names["merged"])]
    try:
        run(mount, timeout_s=10)
    except ClusterError as error:
        return Finding(what, str(error).splitlines()[-1], fix)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return Finding(what)


def _check(what: str, fix: str, good: Callable[[], bool], problem: str) -> Finding:
    return Finding(what) if good() else Finding(what, problem, fix)


def _apt(package: str) -> str:
    return f"package {package} on Debian and Ubuntu"


def _join(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
