"""Who may read the metrics where a token is required, by the rules of a real API server."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server.releases import NAMESPACE, PLACES, Operator, Release
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

HOST = f"gp-gracepoint.{NAMESPACE}.svc"


@pytest.fixture
def release(server: ApiServer, tmp_path: Path) -> Iterator[Release]:
    made = Release(server, tmp_path)
    yield made
    made.uninstall()


def get(operator: Operator, authorities: str, token: str | None) -> tuple[int, str]:
    """Asks as Prometheus does, which checks the certificate for the Service's name."""
    context = ssl.create_default_context(cadata=authorities)
    context.check_hostname = False  # the name is another one here
    connection = http.client.HTTPSConnection("127.0.0.1", operator.metrics, timeout=30, context=context)
    try:
        connection.request("GET", "/metrics", headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_for_those_who_may_get_them(release: Release) -> None:
    release.upgrade("metrics.requireToken=true")
    kubectl = release.server.kubectl
    tokens = {}
    for name in ("prometheus", "stranger"):
        kubectl("create", "serviceaccount", name, f"--namespace={NAMESPACE}")
        tokens[name] = kubectl("create", "token", name, f"--namespace={NAMESPACE}").stdout.strip()
    role = ("--clusterrole=gp-gracepoint-metrics", f"--serviceaccount={NAMESPACE}:prometheus")
    kubectl("create", "clusterrolebinding", "prometheus-reads-gracepoint", *role)
    with release.operator() as operator:
        wait_until("the operator to be ready", operator.ready, timeout_s=180, hint=operator.log.read_text)
        authorities = release.get("configmap", PLACES.config_map)["data"]["ca-bundle.crt"]
        status, text = get(operator, authorities, tokens["prometheus"])
        assert status == 200
        assert "gracepoint_subscriptions_open" in text
        status, text = get(operator, authorities, tokens["stranger"])
        assert status == 403
        assert f"system:serviceaccount:{NAMESPACE}:stranger" in text
        assert get(operator, authorities, "made-up")[0] == 401
        assert get(operator, authorities, None)[0] == 401
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{operator.url}/metrics", timeout=30)
