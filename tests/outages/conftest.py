"""A real API server, and a proxy in front of it that makes outages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outages.api_server import ApiServer
from tests.outages.fault_proxy import FaultProxy
from tests.testcluster import parts
from tests.testcluster.api import ClusterError


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    try:
        for program in ("etcd", "kube-apiserver", "kubectl"):
            parts.program(program)
    except ClusterError as error:
        pytest.skip(f"no API server on this machine: {error}")
    server = ApiServer(tmp_path_factory.mktemp("api-server"))
    try:
        server.start()
        server.install_kinds()
        yield server
    finally:
        server.stop()


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[FaultProxy]:
    made = FaultProxy(api_server.url, api_server.ca)
    yield made
    made.close()


@pytest.fixture
def kubeconfig(api_server: ApiServer, proxy: FaultProxy) -> Path:
    """Through the proxy."""
    return api_server.kubeconfig(proxy.url)


@pytest.fixture(autouse=True)
def no_nodes(api_server: ApiServer) -> Iterator[None]:
    """Leaves the API server without objects."""
    yield
    api_server.kubectl("delete", "nodes", "--all", "--wait=true")
