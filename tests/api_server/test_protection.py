"""Pods that are protected from autoscalers, on a real API server: their annotations, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.wire.messages import Spent
from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.objects import PROTECTING, SET_BY_US
from gracepoint_operator.recording.replica_lease import LABEL
from tests.api_server.gang import Gang, Replica, running, until
from tests.api_server.releases import NAMESPACE, may_read, templates
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

KARPENTER, AUTOSCALER = PROTECTING
OPERATOR = "system:serviceaccount:gp-system:gp-gracepoint"


async def annotations_of(gang: Gang, index: int) -> dict[str, str]:
    pod = await gang.api.get(objects.PODS, gang.name, gang.pod(index))
    return dict(pod["metadata"].get("annotations") or {})


async def protected(gang: Gang, replica: Replica, expected: bool) -> None:
    async def reached() -> bool:
        await replica.watch()
        found = [await annotations_of(gang, index) for index in (0, 1)]
        return all((item.get("karpenter.sh/do-not-disrupt") == "true") is expected for item in found)

    await until(reached, f"the pods to be protected: {expected}")


async def test_pods_are_protected_until_a_checkpoint_is_young(gang: Gang) -> None:
    await gang.make()
    young = {"voluntaryDisruption": {"checkpointYoungerThanSeconds": 3}}
    await gang.api.merge(objects.POLICIES, gang.name, "careful", {"spec": young})
    async with running(gang) as replica:
        pod = replica.core.cache.objects.pod_named(gang.name, gang.pod(0))
        assert pod is not None
        replica.core.writers.policies.goodput.take_times(pod, "s-0", Spent(now_s=2.0, joined_s=1.0))
        await protected(gang, replica, True)
        assert (await annotations_of(gang, 0)).keys() == {*PROTECTING, SET_BY_US}
        replica.core.writers.policies.goodput.take_times(pod, "s-0", Spent(now_s=9.0, joined_s=1.0, restored_s=9.0))
        await protected(gang, replica, False)
        assert await annotations_of(gang, 0) == {}
        await protected(gang, replica, True)  # three seconds later


@pytest.fixture
def guarded(server: ApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server with the chart's role and admission policy for it."""
    files = ("protection.yaml", "pod-deletion.yaml", "rbac.yaml")
    values = ("protection.enabled=true", "podDeletion.enabled=true")
    with templates(server, tmp_path, *files, namespace=NAMESPACE, values=values):
        yield server


def patched(server: ApiServer, patch: object, user: str) -> str:
    """What the API server says of a patch of the pod ``target``. Empty if it is accepted."""
    argv = ("patch", "pod", "target", "--namespace=default", "--type=merge", "--dry-run=server")
    done = server.kubectl(*argv, f"--patch={json.dumps(patch)}", f"--as={user}", check=False)
    return "" if done.returncode == 0 else done.stderr


def test_operator_changes_no_pod_but_by_its_annotations(guarded: ApiServer) -> None:
    meta = {
        "name": "target",
        "namespace": "default",
        "annotations": {"app": "x"},
        "labels": {"app": "x", LABEL_POLICY: "careful"},
    }
    spec = {"containers": [{"name": "c", "image": "one"}]}
    guarded.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    try:
        others: dict[str, object] = {
            "image": {"spec": {"containers": [{"name": "c", "image": "two"}]}},
            "label": {"metadata": {"labels": {"app": "y"}}},
            "annotation": {"metadata": {"annotations": {"app": "y"}}},
            "annotation taken away": {"metadata": {"annotations": {"app": None}}},
            "finalizer": {"metadata": {"finalizers": ["example.com/never"]}},
            "value of Karpenter's": {"metadata": {"annotations": {KARPENTER: "false"}}},
            "value of the autoscaler's": {"metadata": {"annotations": {AUTOSCALER: "true"}}},
            "value of the operator's": {"metadata": {"annotations": {SET_BY_US: "app"}}},
        }
        why = "the operator changes no pod but by the annotations"
        wait_until("the admission policy", lambda: why in patched(guarded, others["label"], OPERATOR), timeout_s=60)
        for what, patch in others.items():
            assert why in patched(guarded, patch, OPERATOR), what
        ours = {"metadata": {"annotations": {**PROTECTING, SET_BY_US: ",".join(PROTECTING)}}}
        assert patched(guarded, ours, OPERATOR) == ""
        partly = {KARPENTER: "true", SET_BY_US: KARPENTER}
        guarded.kubectl("annotate", "pod", "target", "--namespace=default", f"{AUTOSCALER}=true")  # a user's
        assert patched(guarded, {"metadata": {"annotations": partly}}, OPERATOR) == ""
        guarded.kubectl("label", "pod", "target", "--namespace=default", f"{LABEL_POLICY}-")
        assert why in patched(guarded, ours, OPERATOR), "a pod that names no policy"
        guarded.kubectl("label", "pod", "target", "--namespace=default", "app=z", "--overwrite")  # others may
    finally:
        guarded.kubectl("delete", "pod", "target", "--namespace=default", "--force", check=False)


@pytest.fixture
def leasing(server: ApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server with the chart's role and admission policy for Leases, in a namespace of other controllers."""
    reading = may_read(server, "leases.coordination.k8s.io", "get,watch", namespace="default")
    with templates(server, tmp_path, "leases.yaml", namespace="default"), reading:
        yield server


def test_operator_writes_no_lease_but_those_of_its_replicas(leasing: ApiServer) -> None:
    why = "the operator writes no Lease but those of its replicas"

    def said(
        verb: str, name: str, label: str = "", *, by: str = "--as=system:serviceaccount:default:gp-gracepoint"
    ) -> str:
        spec = {"holderIdentity": "thief", "leaseDurationSeconds": 60}
        meta = {"name": name, "namespace": "default", "labels": {label: ""} if label else {}}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
        if verb == "create":
            done = leasing.kubectl("create", by, "--filename=-", stdin=json.dumps(body), check=False)
        elif verb == "patch":
            patch = ("--type=merge", f"--patch={json.dumps({'spec': spec})}")
            done = leasing.kubectl("patch", "lease", name, "--namespace=default", by, *patch, check=False)
        else:
            done = leasing.kubectl("delete", "lease", name, "--namespace=default", by, "--wait=false", check=False)
        return "" if done.returncode == 0 else done.stderr

    assert said("create", "kube-scheduler", by="--namespace=default") == ""
    try:
        wait_until("the admission policy", lambda: why in said("patch", "kube-scheduler"), timeout_s=60)
        assert why in said("delete", "kube-scheduler")
        assert why in said("create", "another", LABEL)
        assert why in said("create", "gracepoint-another")
        assert said("create", "gracepoint-a", LABEL) == ""
        assert said("patch", "gracepoint-a") == ""
        assert said("delete", "gracepoint-a") == ""
        assert said("patch", "kube-scheduler", by="--namespace=default") == "", "others may"
    finally:
        leasing.kubectl("delete", "lease", "--all", "--namespace=default", check=False)


def test_operator_deletes_no_pod_that_names_no_policy_or_runs(guarded: ApiServer) -> None:
    # On a node, as the API server deletes pods by force that are on none.
    spec = {"nodeName": "node-1", "containers": [{"name": "c", "image": "one"}]}
    for name, labels in (("stranger", {"app": "x"}), ("process", {LABEL_POLICY: "careful"})):
        meta = {"name": name, "namespace": "default", "labels": labels}
        guarded.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})

    def deleted(name: str, user: str) -> str:
        """What the API server says of a deletion. Empty if it is accepted."""
        argv = ("delete", "pod", name, "--namespace=default", "--dry-run=server", f"--as={user}")
        done = guarded.kubectl(*argv, check=False)
        return "" if done.returncode == 0 else done.stderr

    try:
        why = "the operator deletes only pods that name a policy"
        wait_until("the admission policy", lambda: why in deleted("stranger", OPERATOR), timeout_s=60)
        assert "only pods that have ended or failed" in deleted("process", OPERATOR)
        ended = {"name": "c", "image": "one", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Running", "containerStatuses": [ended | {"state": {"terminated": {"exitCode": 77}}}]}
        patch = ("--type=merge", "--subresource=status", f"--patch={json.dumps({'status': status})}")
        guarded.kubectl("patch", "pod", "process", "--namespace=default", *patch)
        assert deleted("process", OPERATOR) == ""
    finally:
        guarded.kubectl("delete", "pod", "stranger", "process", "--namespace=default", "--force", check=False)
