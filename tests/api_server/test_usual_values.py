"""The chart with the values that people have set for other charts, installed where system classes are guarded as on
GKE: pods of them are admitted only in namespaces that have a quota for them.

The Deployment's and ReplicaSet's controllers make pods, which no kubelet runs. The operator runs as a process beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api_server.components import component
from tests.api_server.releases import NAMESPACE, Release
from tests.chart.other_charts import CERT_MANAGER, KARPENTER
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer, open_api_server, why_not
from tests.testcluster.shell import wait_until

CLASS = "system-cluster-critical"
GUARDED = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AdmissionConfiguration",
    "plugins": [
        {
            "name": "ResourceQuota",
            "configuration": {
                "apiVersion": "apiserver.config.k8s.io/v1",
                "kind": "ResourceQuotaConfiguration",
                "limitedResources": [
                    {
                        "resource": "pods",
                        "matchScopes": [{"scopeName": "PriorityClass", "operator": "In", "values": [CLASS]}],
                    }
                ],
            },
        }
    ],
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("guarded")
    configuration = folder / "admission.yaml"
    configuration.write_text(yaml.safe_dump(GUARDED))
    flags = (f"--admission-control-config-file={configuration}",)
    controllers = ",".join(
        f"{name}-controller" for name in ("deployment", "replicaset", "resourcequota", "garbage-collector")
    )
    (folder / "server").mkdir()
    with (
        open_api_server(folder / "server", service_accounts=True, flags=flags) as made,
        component(made, folder, "kube-controller-manager", f"--controllers={controllers}", other=""),
    ):
        made.define(parts.module_folder("jobset") / "config" / "components" / "crd" / "bases")
        yield made


@pytest.fixture
def release(guarded: ApiServer, tmp_path: Path) -> Iterator[Release]:
    made = Release(guarded, tmp_path)
    yield made
    made.uninstall()


def pods(release: Release, count: int) -> list[dict[str, Any]]:
    """The operator's pods once there are so many."""
    selector = "--selector=app.kubernetes.io/name=gracepoint,app.kubernetes.io/instance=gp"

    def found() -> list[dict[str, Any]]:
        answer = release.server.kubectl("get", "pods", f"--namespace={NAMESPACE}", selector, "--output=json")
        items: list[dict[str, Any]] = json.loads(answer.stdout)["items"]
        return items

    def why() -> str:
        return release.server.kubectl("get", "replicasets", f"--namespace={NAMESPACE}", "--output=yaml").stdout

    wait_until(f"{count} pods", lambda: len(found()) == count, timeout_s=60, hint=why)
    return found()


@pytest.mark.parametrize("values", [CERT_MANAGER, KARPENTER], ids=["cert-manager", "Karpenter"])
def test_values_of_other_charts_work_at_the_first_try(release: Release, values: str) -> None:
    release.install(values=values)
    for pod in pods(release, 2):
        assert pod["spec"]["priorityClassName"] == CLASS
    with release.operator() as operator:
        wait_until("the operator to be ready", operator.ready, timeout_s=180, hint=operator.log.read_text)


def test_pods_do_without_the_class_where_a_quota_forbids_it(release: Release) -> None:
    release.server.kubectl("create", "namespace", NAMESPACE, check=False)
    scope = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": [CLASS]}]}
    forbids = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none-of-the-system", "namespace": NAMESPACE},
        "spec": {"hard": {"pods": "0"}, "scopeSelector": scope},
    }
    release.server.create(forbids)
    try:
        notes = release.install()
        assert "none-of-the-system" in notes
        assert [pod["spec"].get("priorityClassName") for pod in pods(release, 2)] == [None, None]
    finally:
        release.server.kubectl("delete", "resourcequota", "none-of-the-system", f"--namespace={NAMESPACE}")
