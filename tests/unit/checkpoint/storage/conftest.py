"""The stores that the contract holds for, each with an empty folder."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from tests import loop_mount
from tests.object_stores.fixtures import STORES
from tests.unit.checkpoint.storage.fakes.unsent import S3Settings
from tests.unit.checkpoint.storage.fakes.volatile import VolatilePath, VolatileStore

TMPFS = Path("/dev/shm")


#: The stores whose folders are real and can be renamed.
RENAMING = ["posix", "posix-tmpfs", "memory", "volatile"]
#: File systems that are made and mounted for the tests.
MOUNTED = [pytest.param(kind, marks=pytest.mark.mounts) for kind in ("ext4", "xfs", "btrfs")]


@contextlib.contextmanager
def opened(store: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[StoragePath]:
    """Gives an empty folder of the store."""
    match store:
        case "posix":
            yield storage_path(folder)
        case "posix-tmpfs":
            if not TMPFS.is_dir():
                pytest.skip(f"this machine has no {TMPFS}")
            with tempfile.TemporaryDirectory(dir=TMPFS) as temporary:
                yield storage_path(temporary)
        case "memory":
            found = storage_path(f"memory://contract-{secrets.token_hex(8)}")
            found.make_folder()
            yield found
            found.delete_folder()
        case "ext4" | "xfs" | "btrfs":
            with tempfile.TemporaryDirectory(dir=request.getfixturevalue(f"{store}_top")) as temporary:
                yield storage_path(temporary)
        case "gs" | "s3" | "moto":
            bucket = request.getfixturevalue(f"{store}_bucket")
            yield storage_path(f"{bucket.uri}/top")
        case _:
            found = VolatilePath(VolatileStore(), "/top")
            found.make_folder()
            yield found


@pytest.fixture
def s3_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Settings:
    return S3Settings(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def ext4_top(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An ext4. The folders of ``posix`` lie on the machine's own file system, which may be another."""
    yield from mounted("ext4", tmp_path_factory)


@pytest.fixture(scope="session")
def xfs_top(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An XFS."""
    yield from mounted("xfs", tmp_path_factory)


@pytest.fixture(scope="session")
def btrfs_top(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Btrfs."""
    yield from mounted("btrfs", tmp_path_factory)


def mounted(kind: str, folders: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := loop_mount.why_not(kind):
        pytest.skip(reason)
    with loop_mount.mounted(kind, folders.mktemp(kind)) as mount:
        yield mount.top


@pytest.fixture(params=[*RENAMING, *STORES, pytest.param("moto", marks=pytest.mark.integration), *MOUNTED])
def top(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoragePath]:
    with opened(request.param, request, tmp_path) as found:
        yield found


@pytest.fixture(params=[*RENAMING, *MOUNTED])
def renaming(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoragePath]:
    """Returns an empty folder of each store whose folders can be renamed."""
    with opened(request.param, request, tmp_path) as found:
        assert found.renames
        yield found
