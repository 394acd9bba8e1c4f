"""What processes have left behind after their end: processes, shared memory, sockets, and files beside the steps.

Looks at /proc. There are no threads and no state.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import retention
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.process_group import SingleProcess

_PATIENCE_S = 60.0
_MEMORY = "/memfd:gracepoint"
#: Parts of names that files have only while they are written, ours and TensorStore's.
_TEMPORARY = (".gracepoint", ".tmp", "__lock")


def is_alive(pid: int) -> bool:
    """Returns whether a process runs. One that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_with(variable: str, value: str) -> list[int]:
    """Returns the processes that were started with this variable in their environment."""
    entry = f"{variable}={value}\0".encode()
    return [pid for pid in _processes() if entry in _read(pid, "environ") and is_alive(pid)]


def shared_memory(pids: Iterable[int] | None = None) -> list[str]:
    """Returns the shared memory of Gracepoint that processes hold open or have mapped.

    Args:
        pids: The processes. None: all of this machine.
    """
    found = []
    for pid in _processes() if pids is None else pids:
        mapped = sum(_MEMORY.encode() in line for line in _read(pid, "maps").splitlines())
        held = sum(target.startswith(_MEMORY) for target in _open_files(pid))
        if mapped or held:
            found.append(f"process {pid} has {held} open and {mapped} mapped")
    return found


def sockets_below(folder: Path) -> list[str]:
    """Returns the Unix sockets with a name in a folder: those that are bound, and files that are left of others."""
    bound = [line.split()[7:8] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {name for names in bound for name in names if name.startswith(f"{folder}/")}
    return sorted(names | {str(path) for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)})


def beside_the_steps(root: str | Path) -> list[str]:
    """Returns the files or objects of a checkpoint directory that belong to no step, and temporary ones of steps.

    Not the hidden file that shows a file server's time: one of a process that was killed then is deleted an hour later.
    """
    keys = [entry.key for entry in storage_path(str(root)).entries()]
    keys = [key for key in keys if not key.startswith(".gracepoint-now.")]
    return sorted(key for key in keys if not key.partition("/")[0].isdigit() or any(each in key for each in _TEMPORARY))


def start_again(root: str | Path, like: Any) -> int | None:
    """Does what the next start of a job does an hour later: restores, and deletes what was not finished.

    Returns:
        The step that it restores. None: there is none.
    """
    with (
        mock.patch.object(retention, "UNFINISHED_KEPT_S", 0.0),
        mock.patch.object(RenameCommit, "quiet_s", 0.0),
        mock.patch.object(ManifestCommit, "quiet_s", 0.0),
    ):
        checkpointer = StepCheckpointer(Layout(storage_path(root)), gang=SingleProcess(), attempt="next-0-start")
        restored = checkpointer.restore(like, timeout_s=_PATIENCE_S)
        checkpointer.close(_PATIENCE_S)
    return None if restored is None else restored.step


def _processes() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def _open_files(pid: int) -> list[str]:
    found = []
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for link in links:
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return found
