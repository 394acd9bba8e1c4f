"""The stores in which compiled programs can be, each with an empty folder."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from tests.object_stores.fixtures import STORES


@pytest.fixture(params=["posix", "memory", *STORES])
def top(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    if request.param == "posix":
        return storage_path(tmp_path / "programs")
    if request.param == "memory":
        return storage_path(f"memory://programs-{secrets.token_hex(8)}")
    bucket = request.getfixturevalue(f"{request.param}_bucket")
    return storage_path(f"{bucket.uri}/programs")
