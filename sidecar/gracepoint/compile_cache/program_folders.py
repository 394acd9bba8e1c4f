"""Names of the folders that hold compiled programs. Pure.

<top>/
  jax-<version>-jaxlib-<version>-<platform>-<processes>x<devices>-<hash>/   one version of JAX on one topology
    all/                    programs on devices of several processes. The first of its processes writes a program
    process-<N>/            programs that process N has for itself: those on its own devices, and those whose keys
                            differ from the keys of process 0
      <program>-<hash>.program

A program of one version or topology is of no use for another. With a folder for each, a process reads no more than it
may need, and programs that nobody uses any more are deleted together.

JAX's own key of a program covers all of this, too. The folder only divides the programs: if its name said too little,
JAX would still not find a program that does not fit. The exception is the CPU: a program that was compiled for one CPU
may not run on another, and JAX's key does not say which CPU it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping

from gracepoint.compile_cache.program_file import is_file_name

#: The folder of compiled programs in a directory of checkpoints. Names with a leading dot are never steps.
IN_CHECKPOINTS = ".compiled-programs"
#: The folder of programs on devices of several processes.
SHARED = "all"

_FOLDER = r"jax-[\w.-]+-[0-9a-f]{16}"
_PART = r"all|process-\d+"
_KEY = re.compile(rf"(?P<folder>{_FOLDER})/(?P<part>{_PART})/(?P<name>[^/]+)", re.ASCII)
#: What a process that was killed may leave in a file system, where files are written under another name first.
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.partial-[0-9a-f]{16}", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[^\w.]", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """What a compiled program depends on, beside the program itself.

    Attributes:
        jax: Version of jax.
        jaxlib: Version of jaxlib.
        platform: Name of JAX's backend, such as ``gpu``.
        platform_version: The version as the backend describes it. It may have several lines.
        devices: Number of devices of each kind, of all processes.
        processes: Number of processes.
        host: What identifies the kind of CPU. Empty if programs run on an accelerator.
        fingerprint: A digest of what JAX's keys of programs contain of the topology. On CPUs it differs from process to
            process. Empty if it is not known.
    """

    jax: str
    jaxlib: str
    platform: str
    platform_version: str
    devices: Mapping[str, int]
    processes: int
    host: str = ""
    fingerprint: str = ""


def folder_of(platform: Platform) -> str:
    """Returns the name of the folder for programs of a platform."""
    exact = repr([getattr(platform, field.name) for field in dataclasses.fields(platform) if field.name != "devices"])
    digest = hashlib.sha256(f"{exact}{sorted(platform.devices.items())}".encode()).hexdigest()
    words = ["jax", platform.jax, "jaxlib", platform.jaxlib, platform.platform]
    topology = f"{platform.processes}x{sum(platform.devices.values())}"
    return "-".join([*(_NOT_IN_NAMES.sub("_", word)[:40] for word in words), topology, digest[:16]])


def own_part(process_index: int) -> str:
    """Returns the name of the folder of programs that one process has for itself."""
    return f"process-{process_index}"


@dataclasses.dataclass(frozen=True)
class ProgramPlace:
    """Where a file lies below the top.

    Attributes:
        folder: Folder of a version and topology.
        is_program: True for a file that holds a program. False for one whose writer died before it had its name.
    """

    folder: str
    is_program: bool


def place_of(key: str) -> ProgramPlace | None:
    """Returns where a file lies, given its key relative to the top. None if it is not a file of ours."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    if is_file_name(found["name"]):
        return ProgramPlace(found["folder"], is_program=True)
    unfinished = _UNFINISHED.fullmatch(found["name"])
    if unfinished is not None and is_file_name(unfinished["name"]):
        return ProgramPlace(found["folder"], is_program=False)
    return None
