"""One real API server with etcd for all tests here, with the CRDs of Gracepoint and JobSet, and one of the newest
Kubernetes for what only that has.

Skipped where the parts are not built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint_operator.kube.client import KubeClient
from tests.api_server.gang import Gang
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer, open_api_server, why_not
from tests.testcluster.shell import wait_until

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever a test here waits for says so before the test is over: an operator may take minutes to start."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The API server."""
    if reason := why_not():
        pytest.skip(reason)
    with open_api_server(tmp_path_factory.mktemp("api-server")) as made:
        _define(made)
        yield made


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server of the newest Kubernetes, with its API of groups of pods."""
    if reason := why_not(parts.NEWEST_KUBERNETES):
        pytest.skip(reason)
    flags = ("--feature-gates=GenericWorkload=true", "--runtime-config=scheduling.k8s.io/v1beta1=true")
    with open_api_server(tmp_path_factory.mktemp("newest"), other=parts.NEWEST_KUBERNETES, flags=flags) as made:
        _define(made)
        yield made


@pytest.fixture
def gang(request: pytest.FixtureRequest, server: ApiServer) -> Iterator[Gang]:
    """A gang that is not made yet, in a namespace of its own."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-")
    api = KubeClient.connect(str(server.kubeconfig))
    yield Gang(server, api, name)
    api.close()


def _define(made: ApiServer) -> None:
    made.define(_ROOT / "crds", parts.module_folder("jobset") / "config" / "components" / "crd" / "bases")
    for plural in ("jobsets", "checkpointpolicies", "clustercheckpointpolicies", "preemptions", "preemptionrequests"):
        wait_until(f"the API of {plural}", functools.partial(_is_served, made, plural), timeout_s=30)


def _is_served(server: ApiServer, plural: str) -> bool:
    return bool(server.kubectl("get", plural, "--output=json").stdout)
