"""The catalogue against a real API server: what providers write on real objects becomes Preemptions.

Each row has a node of its own that no kubelet belongs to, and a JobSet with one pod that is bound there and never
starts: the API server, the controllers, the scheduler and the operator are real, and the policy only observes.
Karpenter's and Kueue's resources come while the operator runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterator

import pytest
from kubernetes import client, config

from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.names import GROUP, JOBSET_LABEL_NAME, LABEL_POLICY
from tests.cluster.conftest import MARK, NAMESPACE
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_definitions

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

POLICY = "observed"
GRACE_S = 45
JOBSET_API = ("jobset.x-k8s.io", "v1alpha2", NAMESPACE, "jobsets")
CLAIMS = ("karpenter.sh", "v1", "nodeclaims")
#: Karpenter's, which holds a NodeClaim while its node is drained.
FINALIZER = "karpenter.sh/termination"
#: Its own, so that nothing else is put on these nodes.
KEEP_OFF = {"key": "example.com/of-the-catalogues-test", "effect": "NoSchedule"}
GONE, EVACUATE = "node.kubernetes.io/out-of-service", "example.com/evacuate"
#: Nobody speaks for these nodes, which the node controller takes for lost after a while; and it is to leave the pods to
#: the test.
TOLERATIONS: list[Json] = [
    {"key": KEEP_OFF["key"], "operator": "Exists"},
    *(
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
        for key in ("not-ready", "unreachable")
    ),
    *({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600} for key in (GONE, EVACUATE)),
]


@dataclasses.dataclass(frozen=True)
class Api:
    """The API server, on one connection."""

    cluster: Cluster
    connection: client.ApiClient

    def taint(self, node: str, key: str, effect: str = "NoSchedule", value: str | None = None) -> None:
        taint = {"key": key, "effect": effect} | ({} if value is None else {"value": value})
        self.node(node, {"spec": {"taints": [KEEP_OFF, taint]}})

    def node(self, node: str, patch: Json) -> None:
        client.CoreV1Api(self.connection).patch_node(node, patch)

    def condition(self, node: str, type: str, status: str, reason: str, message: str) -> None:
        now = stamp(time.time())
        entry = {"type": type, "status": status, "reason": reason, "message": message}
        entry |= {"lastTransitionTime": now, "lastHeartbeatTime": now}
        client.CoreV1Api(self.connection).patch_node_status(node, {"status": {"conditions": [entry]}})

    def claim(self, node: str, *, annotations: Json | None = None, expire_after: str = "Never", **meta: object) -> None:
        body = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodeClaim",
            "metadata": {"name": node, "annotations": annotations or {}, **meta},
            "spec": {"expireAfter": expire_after},
            "status": {"nodeName": node},
        }
        client.CustomObjectsApi(self.connection).create_cluster_custom_object(*CLAIMS, body)

    def workload(self, name: str, spec: Json, *conditions: Json) -> None:
        custom = client.CustomObjectsApi(self.connection)
        uid = custom.get_namespaced_custom_object(*JOBSET_API, name)["metadata"]["uid"]
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": uid}
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {"name": name, "namespace": NAMESPACE, "ownerReferences": [owner]},
            "spec": spec,
            "status": {"conditions": list(conditions)},
        }
        custom.create_namespaced_custom_object("kueue.x-k8s.io", "v1beta2", NAMESPACE, "workloads", body)

    def suspend(self, name: str) -> None:
        resource = (f"jobsets.jobset.x-k8s.io/{name}", f"--namespace={NAMESPACE}")
        self.cluster.kubectl("patch", *resource, "--type=merge", '--patch={"spec": {"suspend": true}}')

    def preempt(self, node: str) -> None:
        """A pod of higher priority wants the place of the one that is there."""
        body = {
            "metadata": {"name": node, "namespace": NAMESPACE},
            "spec": {
                "priorityClassName": node,
                "nodeSelector": {"kubernetes.io/hostname": node},
                "tolerations": [{"operator": "Exists"}],
                "containers": [container()],
            },
        }
        priority = {"metadata": {"name": node}, "value": 1000}
        client.SchedulingV1Api(self.connection).create_priority_class(priority)

        def taken() -> bool:
            """Admission knows of a new class a moment later."""
            try:
                client.CoreV1Api(self.connection).create_namespaced_pod(NAMESPACE, body)
            except client.ApiException as error:
                if error.status != 403:
                    raise
                return False
            return True

        wait_until(f"a pod of the priority class {node}", taken, timeout_s=30)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is done to a node or a JobSet, and what the Preemption says; no cause: there is none."""

    name: str
    act: Callable[[Api, str], None]
    cause: str = ""
    signal: str = ""
    confidence: str = "sure"
    cancelable: bool = False
    deadline_at: float | None = None  # where the object tells one
    job: Json = dataclasses.field(default_factory=dict)
    labels: Json = dataclasses.field(default_factory=dict)  # of the node, before the pod is bound
    runs: bool = False  # the pod does, by what a kubelet would write: time limits count from then on

    @property
    def node(self) -> str:
        return f"{self.name}-{MARK}"


def stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(int(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def container() -> Json:
    return {"name": "main", "image": "none.invalid/none", "resources": {"requests": {"cpu": "1"}}}


def condition(type: str, reason: str, at: float) -> Json:
    return {"type": type, "status": "True", "reason": reason, "message": "", "lastTransitionTime": stamp(at)}


def cases() -> list[Case]:
    now = int(time.time())
    soon = now + 1800
    label, annotation = "cloud.google.com/scheduled-maintenance-time", "node.gke.io/upcoming-maintenance"
    spot, drained = "cloud.google.com/impending-node-termination", "karpenter.sh/disrupted"
    itn, candidate = "aws-node-termination-handler/spot-itn", "DeletionCandidateOfClusterAutoscaler"
    window = json.dumps({"maintenance_status": "PENDING", "window_start_time": stamp(soon)})
    termination = "karpenter.sh/nodeclaim-termination-timestamp"
    date = datetime.datetime.fromtimestamp(soon, datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")

    def karpenter(api: Api, node: str) -> None:
        api.claim(node, annotations={termination: stamp(soon)})
        api.taint(node, drained)

    def interrupted(api: Api, node: str) -> None:
        labels = {"karpenter.sh/capacity-type": "spot"}
        api.claim(node, annotations={termination: stamp(now + 8 * 3600)}, labels=labels, finalizers=[FINALIZER])
        client.CustomObjectsApi(api.connection).delete_cluster_custom_object(*CLAIMS, node)

    return [
        Case("gke-spot", lambda a, n: a.taint(n, spot), "SpotTermination", f"taint {spot}:NoSchedule"),
        Case(
            "gke-scheduled",
            lambda a, n: a.node(n, {"metadata": {"labels": {label: str(soon)}}}),
            *("Maintenance", f"label {label}={soon}", "likely", True, soon),
        ),
        Case(
            "gke-active",
            lambda a, n: a.node(n, {"metadata": {"labels": {"cloud.google.com/active-node-maintenance": "ONGOING"}}}),
            *("Maintenance", "label cloud.google.com/active-node-maintenance=ONGOING"),
        ),
        Case(
            "gke-upcoming",
            lambda a, n: a.node(n, {"metadata": {"annotations": {annotation: window}}}),
            *("Maintenance", f"annotation {annotation}=", "likely", True, soon),
        ),
        Case("aws-spot", lambda a, n: a.taint(n, itn), "SpotTermination", f"taint {itn}:NoSchedule"),
        Case(
            "aks-preempt",
            lambda a, n: a.condition(n, "VMEventScheduled", "True", "VMEventScheduled", f"Preempt Scheduled: {date}"),
            *("SpotTermination", "Node condition VMEventScheduled (VMEventScheduled)", "sure", True, soon),
        ),
        Case("karpenter-interruption", interrupted, "SpotTermination", "deletion of the NodeClaim"),
        Case("karpenter-time", karpenter, "ScaleDown", "", deadline_at=soon),
        Case(
            "karpenter-expiry",
            lambda a, n: a.claim(n, expire_after="30m0s"),
            *("ScaleDown", "NodeClaim spec.expireAfter=30m0s"),
            runs=True,
        ),
        Case(
            "autoscaler",
            lambda a, n: a.taint(n, "ToBeDeletedByClusterAutoscaler", value=str(now)),
            *("ScaleDown", "taint ToBeDeletedByClusterAutoscaler:NoSchedule"),
            cancelable=True,
        ),
        Case(
            "shutdown",
            lambda a, n: a.condition(n, "Ready", "False", "KubeletNotReady", "node is shutting down"),
            *("NodeShutdown", "Node condition Ready (False, KubeletNotReady)"),
        ),
        Case(
            "no-execute",
            lambda a, n: a.taint(n, EVACUATE, "NoExecute"),
            *("NodeTaint", f"taint {EVACUATE}:NoExecute", "sure", True),
        ),
        Case("gone", lambda a, n: a.taint(n, GONE, "NoExecute"), "NodeLost", f"taint {GONE}:NoExecute"),
        Case("preempted", lambda a, n: a.preempt(n), "PriorityPreemption", "condition DisruptionTarget"),
        Case("suspended", lambda a, n: a.suspend(n), "Suspension", "JobSet spec.suspend=true"),
        Case(
            "kueue-preempted",
            lambda a, n: a.workload(n, {}, condition("Evicted", "Preempted", time.time())),
            *("PriorityPreemption", "Workload condition Evicted (Preempted)"),
        ),
        Case(
            "kueue-limit",
            lambda a, n: a.workload(n, {"maximumExecutionTimeSeconds": 900}, condition("Admitted", "Admitted", now)),
            *("TimeLimit", "Workload spec.maximumExecutionTimeSeconds=900"),
            deadline_at=now + 900,
            runs=True,
        ),
        Case(
            "job-limit",
            lambda a, n: None,
            *("TimeLimit", "Job spec.activeDeadlineSeconds=1500", "sure", True),
            job={"activeDeadlineSeconds": 1500},
            runs=True,
        ),
        # No Preemptions: hints, what was there before the pod, what is far ahead.
        Case("cordoned", lambda a, n: a.node(n, {"spec": {"unschedulable": True}})),
        Case("candidate", lambda a, n: a.taint(n, candidate, "PreferNoSchedule")),
        Case("before", lambda a, n: a.node(n, {"metadata": {"labels": {"x": "y"}}}), labels={label: str(soon)}),
        Case("far", lambda a, n: a.node(n, {"metadata": {"labels": {label: str(now + 86400)}}})),
    ]


def node(case: Case) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": case.node, "labels": {"kubernetes.io/hostname": case.node, **case.labels}},
        "spec": {"taints": [KEEP_OFF]},
    }


def jobset(case: Case) -> Json:
    pod = {
        "restartPolicy": "Never",
        "nodeName": case.node,
        "terminationGracePeriodSeconds": GRACE_S,
        "tolerations": TOLERATIONS,
        "containers": [container()],
    }
    job = {"parallelism": 1, "completions": 1, **case.job, "template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": case.node, "namespace": NAMESPACE, "labels": {LABEL_POLICY: POLICY}},
        "spec": {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]},
    }


def crd(group: str, version: str, kind: str, scope: str) -> Json:
    """A resource of that name, of any fields."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups of the Kubernetes project are protected by this.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [served | {"schema": {"openAPIV3Schema": schema}}],
        },
    }


CRDS = [
    crd("karpenter.sh", "v1", "NodeClaim", "Cluster"),
    crd("kueue.x-k8s.io", "v1beta2", "Workload", "Namespaced"),
]


def as_list(objects: list[Json]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


@contextlib.contextmanager
def bound(cluster: Cluster, all_cases: list[Case]) -> Iterator[Api]:
    """The nodes, and the JobSets' pods on them; all gone in the end."""
    everything = [*CRDS, *(node(case) for case in all_cases), *(jobset(case) for case in all_cases)]
    try:
        cluster.kubectl("create", "-f", "-", stdin=as_list(everything), timeout_s=120)
        wait_for_definitions(cluster.kubectl, *(definition["metadata"]["name"] for definition in CRDS))
        connection = config.new_client_from_config(str(cluster.kubeconfig))
        with connection:
            (place,) = [case.node for case in all_cases if case.name == "preempted"]
            room = {"cpu": "1", "memory": "1Gi", "pods": "4"}
            ready = condition("Ready", "KubeletReady", time.time()) | {"lastHeartbeatTime": stamp(time.time())}
            status = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
            client.CoreV1Api(connection).patch_node_status(place, status)
            wanted = {case.node for case in all_cases}
            wait_until(
                "a pod on each node",
                lambda: pods(connection) >= wanted,
                timeout_s=90,
                hint=lambda: str(pods(connection)),
            )
            running = {case.node for case in all_cases if case.runs}
            core = client.CoreV1Api(connection)
            for pod in core.list_namespaced_pod(NAMESPACE).items:
                if (pod.metadata.labels or {}).get(JOBSET_LABEL_NAME) in running:
                    core.patch_namespaced_pod_status(pod.metadata.name, NAMESPACE, {"status": {"phase": "Running"}})
            yield Api(cluster, connection)
    finally:
        remove(cluster, all_cases)


def pods(connection: client.ApiClient) -> set[str]:
    """The JobSets that have a pod."""
    found = client.CoreV1Api(connection).list_namespaced_pod(NAMESPACE).items
    return {pod.metadata.labels.get(JOBSET_LABEL_NAME, "") for pod in found if pod.metadata.labels}


def remove(cluster: Cluster, all_cases: list[Case]) -> None:
    gone = ("--ignore-not-found", "--wait=false")
    names = [case.node for case in all_cases]
    for claim in (name for name in names if name.startswith("karpenter-interruption")):
        released = ("--type=merge", "--patch", '{"metadata": {"finalizers": null}}')
        cluster.kubectl("patch", "nodeclaims.karpenter.sh", claim, *released, check=False)
    cluster.kubectl("delete", "jobsets.jobset.x-k8s.io", *names, f"--namespace={NAMESPACE}", *gone, timeout_s=90)
    cluster.kubectl("delete", "node", *names, *gone, timeout_s=90)
    cluster.kubectl("delete", "crd", *(crd["metadata"]["name"] for crd in CRDS), *gone)
    cluster.kubectl("delete", "priorityclass", *(name for name in names if name.startswith("preempted")), *gone)
    # Nobody is there to end them gracefully.
    forced = (f"--namespace={NAMESPACE}", "--force", "--grace-period=0", *gone)
    cluster.kubectl("delete", "pod", *(name for name in names if name.startswith("preempted")), *forced)
    cluster.kubectl("delete", "pod", f"--selector={JOBSET_LABEL_NAME} in ({','.join(names)})", *forced, timeout_s=90)


def preemptions(cluster: Cluster) -> dict[str, Json]:
    """The first Preemption of each JobSet, by the JobSet's name; not the requests of other tests."""
    query = ("get", f"preemptions.{GROUP}", f"--namespace={NAMESPACE}", "--output=json")
    specs = [item["spec"] for item in json.loads(cluster.kubectl(*query).stdout)["items"]]
    return {spec["jobSet"]["name"]: spec for spec in sorted(specs, key=lambda spec: -spec["epoch"])}


def misread(found: dict[str, Json], disruptions: list[Case]) -> dict[str, Json]:
    """The Preemptions that do not say what their case wants."""
    wrong = {}
    for case in disruptions:
        spec = found[case.node]
        said = (spec["cause"], spec["signal"], spec["confidence"], spec["cancelable"], spec["mode"], spec["nodes"])
        told = case.deadline_at is None or at(spec["deadline"]) == case.deadline_at
        as_wanted = (case.cause, spec["signal"], case.confidence, case.cancelable, "Observe", [case.node])
        if said != as_wanted or not spec["signal"].startswith(case.signal) or not told:
            wrong[case.name] = spec
    return wrong


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def observe(spec: Json) -> None:
    spec["mode"] = "Observe"


def test_what_providers_write_is_seen_and_what_is_no_end_is_not(installed: Cluster) -> None:
    apply_policy(installed, POLICY, namespace=NAMESPACE, change=observe)
    all_cases = cases()
    disruptions = [case for case in all_cases if case.cause]
    with bound(installed, all_cases) as api:
        for case in all_cases:
            case.act(api, case.node)
        wanted = {case.node for case in disruptions}
        wait_until(
            "a Preemption for each disruption",
            lambda: preemptions(installed).keys() >= wanted,
            timeout_s=60,
            every_s=1,
            hint=lambda: f"missing: {sorted(wanted - preemptions(installed).keys())}",
        )
        # Watches are not in step: a deadline that another object has, as Karpenter's NodeClaim, may be seen last.
        wait_until(
            "what the table says of each",
            lambda: misread(preemptions(installed), disruptions) == {},
            timeout_s=30,
            every_s=1,
            hint=lambda: str(misread(preemptions(installed), disruptions)),
        )
        found = preemptions(installed)
    others = {case.node for case in all_cases if not case.cause}
    assert others & found.keys() == set(), "hints, what was there before the pod, and what is far ahead"
