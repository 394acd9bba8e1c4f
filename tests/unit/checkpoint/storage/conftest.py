"""The back ends that the contract holds for, each with an empty folder."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from tests.unit.checkpoint.storage.volatile import VolatileBackend

TMPFS = Path("/dev/shm")


@pytest.fixture(params=["posix", "posix-tmpfs", "memory", "volatile"])
def top(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoragePath]:
    match request.param:
        case "posix":
            yield storage_path(tmp_path)
        case "posix-tmpfs":
            if not TMPFS.is_dir():
                pytest.skip(f"this machine has no {TMPFS}")
            folder = tempfile.mkdtemp(dir=TMPFS)
            yield storage_path(folder)
            shutil.rmtree(folder)
        case "memory":
            found = storage_path(f"memory://contract-{secrets.token_hex(8)}")
            found.make_folder()
            yield found
            found.delete_folder()
        case _:
            found = StoragePath(VolatileBackend(), "/top")
            found.make_folder()
            yield found
