"""Wheels for image builds, downloaded by this machine's pip so that the build itself needs no network.

The pip of this machine may be set up in its own way (an index, a certificate); nothing of that reaches an
image. The build sees a read-only folder of wheels and a pip.conf that points to it, both mounted, and its
Dockerfile knows of neither.

Processes: one pip, to its end. Threads: the progress one of ``parts``.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.testcluster import cache
from tests.testcluster.parts import progress
from tests.testcluster.shell import run
from tests.testcluster.versions import GLIBC_MINOR, PYTHON_VERSION

MOUNT = "/wheelhouse"
_CONFIG = f"[global]\nno-index = true\nfind-links = {MOUNT}\ndisable-pip-version-check = true\n"


def requirements_of(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """What pip needs to install a project with extras: build backend, dependencies, and those of the extras."""
    data = tomllib.loads(pyproject.read_text())
    project = data.get("project", {})
    optional = project.get("optional-dependencies", {})
    own = re.compile(rf"^{re.escape(project.get('name', ''))}\[([^\]]+)\]$", re.IGNORECASE)
    found: list[str] = list(data.get("build-system", {}).get("requires", ["setuptools", "wheel"]))
    found += project.get("dependencies", [])
    waiting, seen = list(extras), set[str]()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in optional[extra]:
            if match := own.match(requirement.replace(" ", "")):
                waiting += match.group(1).split(",")
            else:
                found.append(requirement)
    return sorted(set(found))


def pinned(file: Path) -> list[str]:
    """The versions in a requirements file with hashes."""
    return re.findall(r"^([\w.\-]+==[\w.\-]+)", file.read_text(), re.M)


def prepare(requirements: Sequence[str]) -> list[str]:
    """Download wheels unless they are in the cache.

    Returns:
        The ``--volume`` options that make pip inside a build use them.

    Raises:
        ClusterError: pip could not get them.
    """
    machine = platform.machine()
    target = cache.folder("wheels") / cache.digest(*sorted(requirements), PYTHON_VERSION, machine)
    cache.once(target, lambda folder: _download(requirements, machine, folder))
    config = cache.folder("wheels") / f"pip-{cache.digest(_CONFIG)}.conf"
    cache.once(config, lambda path: path.write_text(_CONFIG))
    return ["--volume", f"{target}:{MOUNT}:ro", "--volume", f"{config}:/etc/pip.conf:ro"]


def _download(requirements: Sequence[str], machine: str, folder: Path) -> None:
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += [
        f"manylinux2014_{machine}",
        f"manylinux2010_{machine}",
        f"manylinux1_{machine}",
        f"linux_{machine}",
    ]
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    argv += ["--python-version", PYTHON_VERSION, "--implementation", "cp"]
    for name in platforms:
        argv += ["--platform", name]
    with progress(f"downloading wheels of {', '.join(requirements)}"):
        run([*argv, *requirements], timeout_s=1200)
