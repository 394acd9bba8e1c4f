"""The operator's requests go through the FlowSchema of the chart, on a real API server."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server.releases import NAMESPACE, Release
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until


@pytest.fixture
def release(server: ApiServer, tmp_path: Path) -> Iterator[Release]:
    made = Release(server, tmp_path)
    yield made
    made.uninstall()


@pytest.mark.parametrize("path", ["/api/v1/nodes", "/apis/gracepoint.dev/v1alpha1/preemptions?limit=1", "/apis"])
def test_requests_of_the_operator_are_served_by_its_own_flow_schema(release: Release, path: str) -> None:
    release.upgrade()
    token = release.server.kubectl("create", "token", "gp-gracepoint", f"--namespace={NAMESPACE}").stdout.strip()
    wanted = release.get("flowschema", "gp-gracepoint")["metadata"]["uid"]
    context = ssl.create_default_context(cafile=str(release.server.ca))
    request = urllib.request.Request(release.server.url + path, headers={"Authorization": f"Bearer {token}"})

    def served_by() -> str:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return str(answer.headers["X-Kubernetes-PF-FlowSchema-UID"])

    wait_until("the API server to use the FlowSchema", lambda: served_by() == wanted, timeout_s=30, hint=served_by)
