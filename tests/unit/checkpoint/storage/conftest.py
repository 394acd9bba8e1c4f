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


@pytest.fixture(params=["posix", "posix-tmpfs", "memory", "volatile", "gs", "s3"])
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
        case "gs" | "s3":
            bucket = request.getfixturevalue(f"{request.param}_bucket")
            yield storage_path(f"{bucket.uri}/top")
        case _:
            found = StoragePath(VolatileBackend(), "/top")
            found.make_folder()
            yield found


@pytest.fixture
def renaming(top: StoragePath) -> StoragePath:
    """Returns ``top`` if its store has real folders that it can rename."""
    if not top.backend.renames:
        pytest.skip("the store has no folders: a prefix is all that it has")
    return top
