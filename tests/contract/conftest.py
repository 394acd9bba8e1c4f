"""Replicas of the operator for a test, and the cluster that they see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from gracepoint_operator.channel.connections import ConnectionLimits
from gracepoint_operator.controller import Controller
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.server import Certificates, Server
from tests.contract.replicas import WEBHOOK_TOKEN, Replica, until
from tests.unit.operator.api import MemoryApi
from tests.unit.operator.objects import NAMESPACE, Clock
from tests.unit.operator.replica import cluster


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def start(authority: trustme.CA, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Starts replicas; stops them all in the end."""
    servers: list[Server] = []
    tls = tmp_path / "tls"
    tls.mkdir()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
    authority.cert_pem.write_to_path(str(tls / "ca.crt"))

    def make(
        api: MemoryApi,
        name: str = "replica-a",
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008  immutable
    ) -> Replica:
        metrics = Metrics()
        core = Controller(api, metrics, time.time, name, write_interval_s=0.05)
        server = Server(
            core,
            api,
            metrics,
            Certificates(tls),
            webhook_token=WEBHOOK_TOKEN,
            service_url="https://localhost",
            https_port=0,
            webhook_port=0,
            health_port=0,
            host="localhost",
            limits=limits,
        )
        servers.append(server)
        server.start(lambda: None)
        until(lambda: core.ready, "the replica to know the cluster")
        return Replica(server, core, api, authority.cert_pem.bytes().decode(), tmp_path)

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def api() -> MemoryApi:
    """A cluster that trains, and the tokens of its pods."""
    made = MemoryApi(Clock(time.time()))
    cluster(made)
    for index in (0, 1):
        made.bind_token(f"token-{index}", NAMESPACE, f"uid-pod-{index}-0")
    return made
