"""A real API server, and a proxy in front of it that makes outages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outages import kinds
from tests.outages.fault_proxy import FaultProxy
from tests.testcluster.api_server import ApiServer, open_api_server, why_not


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if reason := why_not():
        pytest.skip(f"no API server on this machine: {reason}")
    with open_api_server(tmp_path_factory.mktemp("api-server")) as server:
        kinds.install(server)
        yield server


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[FaultProxy]:
    made = FaultProxy(api_server.url, api_server.ca)
    yield made
    made.close()


@pytest.fixture
def kubeconfig(api_server: ApiServer, proxy: FaultProxy) -> Path:
    """Through the proxy."""
    return api_server.kubeconfig_for(proxy.url)


@pytest.fixture(autouse=True)
def no_nodes(api_server: ApiServer) -> Iterator[None]:
    """Leaves the API server without objects."""
    yield
    api_server.kubectl("delete", "nodes", "--all", "--wait=true")
