"""What the operator may write into Workloads of Kueue, on a real API server with Kueue's definition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY
from tests.api_server.releases import NAMESPACE, Release, may_read
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

OPERATOR = f"--as=system:serviceaccount:{NAMESPACE}:gp-gracepoint"
WHY = "the operator changes nothing in a Workload of Kueue but its unhealthy nodes"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
STATUS = {
    "unhealthyNodes": {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    }
}
#: Of Kueue's definition, what is needed here.
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "workloads.kueue.x-k8s.io"},
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "Workload", "plural": "workloads"},
        "versions": [
            {
                "name": "v1beta2",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {**OPEN, "properties": {"status": {**OPEN, "properties": STATUS}}}},
            }
        ],
    },
}
ADMITTED = {"type": "Admitted", "status": "True", "reason": "Admitted"}
ADMISSION = {"clusterQueue": "all", "podSetAssignments": [{"name": "workers", "topologyAssignment": {}}]}
PROTECTED = {"podSets": [{"template": {"metadata": {"labels": {LABEL_POLICY: "careful"}}}}]}
OF_TRAINER = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "one", "uid": "u"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "NodeFailures"}


@pytest.fixture
def guarded(server: ApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server with the chart, and a Workload that Kueue has admitted."""
    release = Release(server, tmp_path)
    release.upgrade()
    server.define(bodies=(DEFINITION,))
    make(server, "one", PROTECTED, nodes=[{"name": "node-0"}])
    with may_read(server, "workloads.kueue.x-k8s.io/status"):
        yield server
    server.kubectl("delete", "crd", "workloads.kueue.x-k8s.io")
    release.uninstall()


def make(
    server: ApiServer,
    name: str,
    spec: object,
    *,
    admission: object = ADMISSION,
    nodes: Sequence[object] = (),
    **meta: object,
) -> None:
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": name, **meta},
        "spec": spec,
    }
    server.kubectl("create", "--namespace=default", "--filename=-", stdin=json.dumps(body))
    status = {"conditions": [ADMITTED], "admission": admission, "unhealthyNodes": list(nodes)}
    server.kubectl(*_patch(name, json.dumps({"status": status})))


def _patch(name: str, patch: str) -> tuple[str, ...]:
    target = ("patch", "workloads", name, "--namespace=default", "--subresource=status")
    return (*target, "--type=merge", f"--patch={patch}")


def said(server: ApiServer, of: str = "one", **status: Any) -> str:
    """What the API server says of a change of the status by the operator. Empty if it is accepted."""
    patch = json.dumps({"status": status})
    done = server.kubectl(*_patch(of, patch), "--dry-run=server", OPERATOR, check=False)
    return "" if done.returncode == 0 else done.stderr


def test_operator_names_unhealthy_nodes_and_evicts_for_them_alone(guarded: ApiServer) -> None:
    wait_until(
        "the admission policy",
        lambda: WHY in said(guarded, admission=None),
        timeout_s=20,
        hint=lambda: said(guarded, admission=None),
    )
    assert said(guarded, unhealthyNodes=[{"name": "node-1"}]) == ""
    assert said(guarded, unhealthyNodes=None) == ""
    assert said(guarded, conditions=[ADMITTED, EVICTED], unhealthyNodes=None) == ""
    refused: dict[str, dict[str, Any]] = {
        "another quota": {"admission": {"clusterQueue": "other"}},
        "a field that was not there": {"clusterName": "other"},
        "another reason": {"conditions": [ADMITTED, {**EVICTED, "reason": "Preempted"}]},
        "another condition": {"conditions": [ADMITTED, {**EVICTED, "type": "Finished"}]},
        "a condition taken away": {"conditions": [EVICTED]},
        "all nodes at once": {"unhealthyNodes": [{"name": "node-1"}, {"name": "node-2"}]},
    }
    for what, status in refused.items():
        assert WHY in said(guarded, **status), what


def test_kueue_cannot_take_out_the_nodes_that_the_operator_has_named(guarded: ApiServer) -> None:
    """It writes by server-side apply, in which a field stays as long as another client owns it."""

    def names() -> str:
        target = ("get", "workloads", "one", "--namespace=default")
        return guarded.kubectl(*target, "--output=jsonpath={.status.unhealthyNodes[*].name}").stdout

    def operator_writes(nodes: list[dict[str, str]] | None) -> None:
        guarded.kubectl(*_patch("one", json.dumps({"status": {"unhealthyNodes": nodes}})), OPERATOR)

    def kueue_applies(**status: object) -> None:
        meta = {"name": "one", "namespace": "default"}
        body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": meta, "status": status}
        how = ("--server-side", "--force-conflicts", "--field-manager=kueue-admission", "--subresource=status")
        guarded.kubectl("apply", *how, "--filename=-", stdin=json.dumps(body))

    operator_writes([{"name": "node-1"}])
    kueue_applies(unhealthyNodes=[{"name": "node-1"}])
    kueue_applies()
    assert names() == "node-1"
    operator_writes(None)
    assert names() == ""


def test_operator_leaves_workloads_alone_that_are_not_of_a_policy_or_not_assigned_to_nodes(guarded: ApiServer) -> None:
    why = "the operator touches only Workloads of Kueue that are assigned to nodes, and whose pods name a policy"
    unassigned = {"clusterQueue": "all", "podSetAssignments": [{"name": "workers"}]}
    make(guarded, "foreign", {"podSets": [{"template": {"metadata": {"labels": {"app": "x"}}}}]})
    make(guarded, "without-pods", {})
    make(guarded, "unassigned", PROTECTED, admission=unassigned)
    make(guarded, "evicted", PROTECTED, admission=None, nodes=[{"name": "node-0"}])
    make(guarded, "train-job", {}, ownerReferences=[OF_TRAINER])
    wait_until("the admission policy", lambda: WHY in said(guarded, admission=None), timeout_s=20)
    for name in ("foreign", "without-pods", "unassigned"):
        assert why in said(guarded, name, conditions=[ADMITTED, EVICTED]), name
        assert why in said(guarded, name, unhealthyNodes=[{"name": "node-1"}]), name
    assert said(guarded, "evicted", unhealthyNodes=None) == "", "it takes out what it has named"
    assert why in said(guarded, "evicted", unhealthyNodes=[{"name": "node-1"}])
    assert said(guarded, "train-job", conditions=[ADMITTED, EVICTED]) == ""
