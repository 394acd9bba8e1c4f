"""A kind whose CRD is installed while a replica runs is watched soon, although discovery shows it late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint_operator.kube import objects
from tests.outages.fault_proxy import FaultProxy, How
from tests.outages.kinds import node_claims
from tests.outages.replica import replica
from tests.testcluster.api_server import ApiServer

CRD = "nodeclaims.karpenter.sh"
PATH = objects.NODE_CLAIMS.path()


@pytest.fixture
def without_karpenter(api_server: ApiServer) -> Iterator[None]:
    """Takes the kind away. It is back after the test."""
    api_server.kubectl("delete", "crd", CRD, "--wait=true")
    yield
    if not is_installed(api_server):
        install(api_server)


def is_installed(api_server: ApiServer) -> bool:
    return api_server.kubectl("get", "crd", CRD, check=False).returncode == 0


def install(api_server: ApiServer) -> None:
    api_server.define(bodies=(node_claims(),))


@pytest.mark.usefixtures("without_karpenter")
@pytest.mark.parametrize(
    "late", ["/apis$", "/apis/karpenter.sh/v1$"], ids=["list of groups", "list of the group's kinds"]
)
def test_kind_that_discovery_shows_late_is_watched_within_seconds(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path, late: str
) -> None:
    with replica(kubeconfig) as running:
        running.until(lambda: proxy.has_seen("/api/v1/nodes?watch=true"), "the watch of nodes")
        before = len(proxy.paths)
        with proxy.fault(How.STALE, late):
            install(api_server)
            api_server.kubectl("annotate", "crd", CRD, "test=last-event")
            running.until(
                lambda: any(path.startswith("GET /apis") for path in proxy.paths[before:]), "kopf to look for the kind"
            )
            time.sleep(1)  # nothing more comes from the CRD
            assert not proxy.has_seen(f"{PATH}?watch=true")
        running.until(lambda: proxy.has_seen(f"{PATH}?watch=true"), "the kind to be watched")
