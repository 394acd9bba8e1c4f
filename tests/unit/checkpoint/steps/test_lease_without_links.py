"""A directory is claimed by one job where the file system has no hard links: the kernel refuses them here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import lease
from gracepoint.checkpoint.steps.lease import Lease
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError
from tests.unit.checkpoint.fakes import lease_process

pytestmark = pytest.mark.skipif(
    platform.machine() not in lease_process.CALLS, reason="the numbers of this machine's system calls are not known"
)

CLAIMERS = 3


@contextlib.contextmanager
def claimers(root: Path, count: int, error: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes that claim ``root`` for jobs of their own when they are told to."""
    with contextlib.ExitStack() as stack:
        found = []
        for index in range(count):
            process = subprocess.Popen(
                [sys.executable, lease_process.__file__, str(root), f"job-{index}", str(error), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            found.append(process)
        for process in found:
            assert line_of(process) == "ready"
        yield found


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def claim(root: Path) -> Lease:
    return lease.claim(
        Layout(storage_path(root)), "job-x", "job-x-0", deadline=Deadline.after(0.0, time.monotonic), sleep=time.sleep
    )


@pytest.mark.long
@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV], ids=errno.errorcode.get)
def test_one_of_several_that_come_at_once_gets_the_directory(tmp_path: Path, error: int) -> None:
    with claimers(tmp_path, CLAIMERS, error) as processes:
        for process in processes:
            tell(process)
        said = [line_of(process) for process in processes]
        (winner,) = [index for index, line in enumerate(said) if line == "held"]
        assert all(line.startswith("refused: ") for index, line in enumerate(said) if index != winner), said
        assert json.loads(Layout(storage_path(tmp_path)).lease().read_bytes())["job"] == f"job-{winner}"
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.integration
def test_lease_without_a_name_is_free_when_it_expires(tmp_path: Path) -> None:
    with claimers(tmp_path, 1, errno.EPERM, "die") as (process,):
        tell(process)
        assert process.wait(30) == 9
    path = Path(Layout(storage_path(tmp_path)).lease())
    assert path.read_bytes() == b""
    with pytest.raises(CheckpointError, match="its lease is empty"):
        claim(tmp_path)
    then_s = path.stat().st_mtime - lease.EXPIRES_S - 1
    os.utime(path, (then_s, then_s))
    held = claim(tmp_path)
    assert json.loads(path.read_bytes())["job"] == "job-x"
    held.release()
