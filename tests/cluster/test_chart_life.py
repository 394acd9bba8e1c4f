"""The chart's life on a real cluster: an upgrade brings the CRDs with it, and removing it keeps what is recorded."""

from __future__ import annotations

import json

import pytest

from demo.install import OPERATOR_NAMESPACE, Images, install_operator
from demo.snapshot import Json
from tests.cluster.conftest import NAMESPACE, POLICY
from tests.testcluster.api import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CRDS = ("checkpointpolicies.gracepoint.dev", "preemptions.gracepoint.dev", "preemptionrequests.gracepoint.dev")


def crd(cluster: Cluster, name: str) -> Json:
    found: Json = json.loads(cluster.kubectl("get", "crd", name, "--output=json").stdout)
    return found


def columns(cluster: Cluster, name: str) -> list[str]:
    return [column["name"] for column in crd(cluster, name)["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_an_upgrade_brings_the_crds_up_to_date(installed: Cluster, images: Images) -> None:
    before = {name: columns(installed, name) for name in CRDS}
    for name in CRDS:  # as an older version of the chart may have left them
        older = [{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns/0"}]
        installed.kubectl("patch", "crd", name, "--type=json", "--patch", json.dumps(older))
        assert columns(installed, name) != before[name]
    install_operator(installed, images.operator)
    assert {name: columns(installed, name) for name in CRDS} == before


def test_the_installation_passes_helm_test(installed: Cluster) -> None:
    """The certificate that the operator made is one that pods and the API server accept, in a pod of its own."""
    done = installed.helm("test", "gracepoint", f"--namespace={OPERATOR_NAMESPACE}", "--timeout=90s")
    assert "Succeeded" in done.stdout


def test_a_node_that_runs_a_replica_can_be_drained(installed: Cluster) -> None:
    """The command of docs/install.md. kubectl refuses pods with local storage, and pods without a controller."""
    mine = "app.kubernetes.io/name=gracepoint"
    found = installed.kubectl("get", "pods", f"--namespace={OPERATOR_NAMESPACE}", f"--selector={mine}", "--output=json")
    nodes = {pod["spec"]["nodeName"] for pod in json.loads(found.stdout)["items"]}
    assert nodes
    for node in nodes:
        drain = ("drain", node, "--ignore-daemonsets", "--dry-run=server", "--timeout=30s")
        done = installed.kubectl(*drain, f"--pod-selector={mine}")
        assert f"node/{node} drained" in done.stdout


def test_removing_the_chart_keeps_crds_and_policies_and_it_can_come_back(installed: Cluster, images: Images) -> None:
    installed.helm("uninstall", "gracepoint", f"--namespace={OPERATOR_NAMESPACE}", "--wait", "--timeout=60s")
    try:
        for name in CRDS:
            assert "deletionTimestamp" not in crd(installed, name)["metadata"]
        policy = installed.kubectl("get", f"checkpointpolicies.gracepoint.dev/{POLICY}", f"--namespace={NAMESPACE}")
        assert POLICY in policy.stdout
    finally:
        install_operator(installed, images.operator)
