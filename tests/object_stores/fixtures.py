"""Fixtures: one server of each kind for a process of the tests, and fresh buckets.

A test with a bucket has the variables of its clients in the environment, and so have the processes that it starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gracepoint.checkpoint.storage.objects.http import close_idle_connections
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.servers import Bucket, Server, open_gcs, open_moto, open_s3, why_not

#: The schemes of the object stores, for the parameters of fixtures. A test with a server is no unit test.
STORES = [pytest.param(scheme, marks=pytest.mark.integration) for scheme in ("gs", "s3")]


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of ``gs://``."""
    _skip_without_servers()
    with open_gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of ``s3://``."""
    _skip_without_servers()
    with open_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server of ``s3://``, which other people wrote: what both do alike, S3 is likely to do."""
    with open_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def gs_bucket(gcs: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A fresh ``gs://`` bucket."""
    yield from lent(gcs.bucket(), monkeypatch)


@pytest.fixture
def s3_bucket(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A fresh ``s3://`` bucket."""
    yield from lent(s3.bucket(), monkeypatch)


@pytest.fixture
def moto_bucket(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A fresh ``s3://`` bucket of moto."""
    yield from lent(moto.bucket(), monkeypatch)


@pytest.fixture(params=STORES)
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """A fresh bucket of each kind."""
    found = request.getfixturevalue(f"{request.param}_bucket")
    assert isinstance(found, Bucket)
    return found


@pytest.fixture(params=STORES)
def object_server(request: pytest.FixtureRequest) -> Server:
    """The server of each kind."""
    found = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    assert isinstance(found, Server)
    return found


@pytest.fixture
def store_proxy(object_server: Server) -> Iterator[FaultProxy]:
    """A proxy in front of the server."""
    proxy = FaultProxy(object_server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def far(object_server: Server, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A fresh bucket that clients reach through the proxy."""
    yield from lent(object_server.bucket(url=store_proxy.url), monkeypatch)


def lent(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Lends a bucket to one test, which has the variables of its clients in the environment."""
    yield set_environment(bucket, monkeypatch)
    close_idle_connections()  # else the process keeps up to 64 to each server, and to each proxy that has ended


def set_environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Sets the variables of the bucket's clients until the test ends; returns the bucket."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


def _skip_without_servers() -> None:
    if reason := why_not():
        pytest.skip(f"no object stores on this machine: {reason}")
