"""The servers keep the conditions that commits rest on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import tensorstore as ts
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from tests.object_stores import servers
from tests.object_stores.servers import Bucket, Server
from tests.testcluster import parts
from tests.testcluster.api import ClusterError

pytestmark = pytest.mark.integration

RACES = 20
WRITERS = 8


def winners(write: Callable[[str, bytes], bool]) -> list[int]:
    """How many of the writers that create the same object at the same time are told that they did, for each race."""
    with ThreadPoolExecutor(WRITERS) as pool:
        return [
            sum(pool.map(lambda writer: write(f"race-{race}", b"%d" % writer), range(WRITERS)))  # noqa: B023
            for race in range(RACES)
        ]


def test_one_of_many_writers_creates_an_object_by_tensorstore(bucket: Bucket) -> None:
    store = ts.KvStore.open(bucket.kvstore("races/")).result()
    absent = store.read("absent").result().stamp.generation

    def create(key: str, value: bytes) -> bool:
        return bool(store.write(key, value, if_equal=absent).result().generation)

    assert winners(create) == [1] * RACES


def test_one_of_many_writers_creates_an_object_by_obstore(s3_bucket: Bucket) -> None:
    store = S3Store(s3_bucket.name, prefix="races")

    def create(key: str, value: bytes) -> bool:
        with contextlib.suppress(AlreadyExistsError):
            obstore.put(store, key, value, mode="create")
            return True
        return False

    assert winners(create) == [1] * RACES


def test_a_write_with_a_stale_generation_changes_nothing(bucket: Bucket) -> None:
    store = ts.KvStore.open(bucket.kvstore()).result()
    first = store.write("key", b"first").result().generation
    second = store.write("key", b"second", if_equal=first).result().generation
    assert second
    assert not store.write("key", b"third", if_equal=first).result().generation
    assert store.read("key").result().value == b"second"


def test_each_bucket_is_empty_at_first(gcs: Server, s3: Server, bucket: Bucket) -> None:
    server = gcs if bucket.scheme == "gs" else s3
    ts.KvStore.open(bucket.kvstore()).result().write("key", b"value").result()
    other = server.bucket()
    assert other.uri != bucket.uri
    assert ts.KvStore.open(other.kvstore()).result().list().result() == []


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "program"
    script.write_text("#!/bin/sh\necho no such flag\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(parts, "program", lambda name: script)
    with (
        pytest.raises(ClusterError, match=r"(?s)ended with 3 before it was ready.*no such flag"),
        servers.open_gcs(tmp_path),
    ):
        pass


def test_missing_servers_are_named_with_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path))
    assert servers.why_not() == (
        "not built: fake-gcs-server, versitygw; run: make servers (which needs Go: https://go.dev/doc/install)"
    )
