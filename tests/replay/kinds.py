"""The kinds of faults: each is done with the means of the one who does it in a real cluster, and undone afterwards.

A kind is a generator: what stands before its ``yield`` is the fault, what stands after it is done when the job trains
again. What a kind promises stands in its decorator. Starts no thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from kubernetes import client, config

from demo import nodes
from demo.install import OPERATOR_NAMESPACE
from demo.snapshot import Json, Pod
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint_operator.trust.bundle import (
    AUTHORITY_LEFT_S,
    Authority,
    Bundle,
    OwnCertificates,
    Pair,
    issue,
    issuers,
    read_certificates,
)
from tests.cluster import asking, machine, operator, queues
from tests.metadata.servers import GceServer
from tests.object_stores.faults import Fault, How, Rule
from tests.replay import account, checks, clocks, trace, trainer, volume
from tests.replay.alerts import LATE, LOST, UNDELIVERED
from tests.replay.workloads import EVERY_STEPS, STORE_SECRET, Store
from tests.testcluster import parts
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_definitions, wait_for_rollout

#: The trainers' priority class: of all pods, they go first.
PRIORITY = "gracepoint-replay"
#: The Job that takes the quota of Kueue's queue.
TAKER = "taker"
#: Of the nodes that are the replay's to disturb: key and value.
LABEL = ("trains", "it")
SNAPSHOT_SERVERS = "gracepoint-snapshots"
_OPERATOR = "app.kubernetes.io/name=gracepoint"
_JOBSET_NAMESPACE = "jobset-system"
#: Of pods that only take a place.
_SLEEP = ["python", "-c", "import time; time.sleep(3600)"]
_PODS_GONE_S = 300.0
_STARTED_S = 600.0
_DRAIN_S = 300
#: After storage was away: longer than a request is repeated, and than the pause before the next save.
_SAVED_S = 180.0
#: How long something is away.
_DOWN_S = 3.0
AWAY_S = 10.0
_SLOW_S = 20
#: An API server is slow once it could not run for so many seconds.
_HELD_BACK_S = 1.0
#: Of a program that takes XLA some seconds, and 350 MiB of memory.
_OPERATIONS = 300
#: Less than the time in which a process takes another one for dead.
_FROZEN_S = 5.0
_PARTED_S = 3.0
#: The policies' head start is a minute: a save begins that long before its deadline.
_SOON_S = 65.0
#: Within the hour in which the job is told of it.
_LATER_S = 1500.0
_HOURS_S = 3 * 3600.0
ACTIVE_MAINTENANCE = "cloud.google.com/active-node-maintenance"
#: Where the operator keeps its certificate, and the authorities that pods are told of. It looks once a minute.
_CERTIFICATES, _TRUST = "gracepoint-certificates", "gracepoint-trust"
_KEPT_S = 240.0
#: Of the metrics of a replica: when the certificate that it serves expires.
_EXPIRY = 'gracepoint_certificate_expiry_timestamp_seconds{certificate="server"}'
_WEEK_S = 7 * 24 * 3600.0
#: AKS's condition of a node, and what it says when nothing is ahead.
_VM_EVENT, _NO_EVENT = "VMEventScheduled", "No scheduled event"
_AWS = "aws-node-termination-handler"
_SPOT_ITN, _SCALE_DOWN, _MOVED_OUT = f"{_AWS}/spot-itn", "ToBeDeletedByClusterAutoscaler", "example.com/moved-out"
#: Keys of all taints that kinds put on nodes.
TAINTS = (nodes.TERMINATION_TAINT["key"], nodes.SCALE_DOWN_TAINT["key"], _SPOT_ITN, _SCALE_DOWN, _MOVED_OUT)
_WEBHOOKS = "validatingwebhookconfigurations.admissionregistration.k8s.io"
_SAVES_FAIL = ("GracepointSavesFail",)
#: By how much clocks are wrong. More than the heartbeat timeout of JAX, which goes by the time of day.
_WRONG_S = 3600.0
_KARPENTER = "karpenter"
_CLAIMS, _CLAIM_FINALIZER = "nodeclaims.karpenter.sh", "karpenter.sh/termination"
#: Of the metrics of a replica: absent while the kind is not watched.
_CLAIMS_WATCHED = 'gracepoint_watch_age_seconds{kind="nodeclaims"}'


class Then(enum.Enum):
    """What becomes of the job."""

    RESTARTS = enum.auto()
    GOES_ON = enum.auto()  # in the same processes


@dataclasses.dataclass
class Scene:
    """What a fault is done to.

    Attributes:
        run: The job, which trains.
        pods: Its pods, by process.
        pod: The one that it is done to.
        nodes: The nodes that are the replay's to disturb.
        metadata: The metadata servers of the nodes, by the node. Empty on a cluster that is not the replay's own.
        image: The trainer's image.
        old: Names of the pods that the fault ends. A kind that ends the gang more than once adds those of each start.
        since_s: From when the time until training counts, and after which it must have begun anew. A kind of several
            acts moves it to the last one.
        store: The proxy in front of the store of its checkpoints. None: they are in a directory.
        unheard: Whether it took a replica of the operator with it: see ``Kind``.
    """

    run: TrainingRun
    pods: tuple[Pod, ...]
    pod: Pod
    nodes: tuple[str, ...]
    metadata: Mapping[str, GceServer]
    image: str
    old: set[str]
    since_s: float
    store: Store = None
    unheard: bool = False

    @property
    def cluster(self) -> Cluster:
        return self.run.cluster

    @property
    def in_namespace(self) -> str:
        return f"--namespace={self.run.namespace}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of faults.

    Attributes:
        name: Its name.
        about: What is done, in words.
        happens: Does it, and undoes it.
        announced: Whether the job gets a notice, so that it must not lose a completed step.
        then: What becomes of the job.
        causes: What the records of it may say as their cause.
        records: How many records there are, at least and at most.
        phases: How each of them may end. Empty: it does not matter.
        unheard: Whether no replica of the operator hears how training ends, so that its account guesses
            (docs/goodput.md#limits).
        counted: How many restarts of it count at most: 1 if the program is to blame, or if a Job cannot tell.
        workloads: What it can be done to.
        own_cluster: Whether it needs a cluster of its own: it reaches further than the job's namespace and nodes, or
            needs the machines of the nodes.
        why_not: Returns why this machine cannot do it. None: it can.
        alerts: Those of the chart's that may fire for it, beside those that its records tell of.
        holds_up: Whether it keeps pods from starting on nodes to which they are bound.
    """

    name: str
    about: str
    happens: Callable[[Scene], contextlib.AbstractContextManager[None]]
    announced: bool
    then: Then
    causes: frozenset[str]
    records: tuple[int, int]
    phases: frozenset[str]
    unheard: bool
    counted: int
    workloads: tuple[str, ...]
    own_cluster: bool
    why_not: Callable[[], str | None]
    alerts: frozenset[str] = frozenset()
    holds_up: bool = False

    @property
    def starts(self) -> int | None:
        """How many starts of a JobSet it leads to, at most. None: as many as it takes."""
        if self.then is Then.GOES_ON:
            return 0
        return max(1, self.records[1]) if self.announced else None

    def later_starts(self, seen: int) -> int:
        """How many starts it may still lead to after it was judged, when there were ``seen`` of them."""
        # Of a kind that may have two records, the second one may end a start after the first one was judged.
        return 0 if self.then is Then.GOES_ON else max(0, self.records[1] - seen)


KINDS: dict[str, Kind] = {}
BOTH = (trace.JOBSET, trace.JOB)
WITH_BUCKET = (trace.JOBSET, trace.JOB, trace.BUCKET)
EVERY = (trace.JOBSET, trace.JOB, trace.BUCKET, trace.QUEUED)
#: Of kinds after which no node is closed to pods: each keeper requests a processor, so that two such pods do not fit on
#: one node.
ON_ALL_NODES = (*EVERY, trace.KEPT)


def _kind(
    name: str,
    *causes: str,
    announced: bool = True,
    then: Then = Then.RESTARTS,
    records: tuple[int, int] | None = None,
    phases: tuple[str, ...] = (Phase.COMMITTED,),
    unheard: bool = False,
    counted: int = 0,
    workloads: tuple[str, ...] = (trace.JOBSET,),
    own_cluster: bool = False,
    alerts: tuple[str, ...] = (),
    holds_up: bool = False,
    why_not: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[[Scene], Iterator[None]]], Callable[[Scene], Iterator[None]]]:
    """Notes a kind. With causes and without ``records``: there is exactly one record."""

    def note(does: Callable[[Scene], Iterator[None]]) -> Callable[[Scene], Iterator[None]]:
        about = " ".join((does.__doc__ or "").split())
        number = records if records is not None else (1, 1) if causes else (0, 0)
        KINDS[name] = Kind(
            name,
            about,
            contextlib.contextmanager(does),
            announced,
            then,
            frozenset(causes),
            number,
            frozenset(phases),
            unheard,
            counted,
            workloads,
            own_cluster,
            why_not,
            frozenset({*alerts, *_of_late_records(number, frozenset(phases), unheard=unheard)}),
            holds_up,
        )
        return does

    return note


def _of_late_records(number: tuple[int, int], phases: frozenset[str], *, unheard: bool) -> tuple[str, ...]:
    """The alerts of records that come, or of acknowledgements that are missed, after a fault was judged."""
    least, most = number
    if most and not phases:
        return LOST, LATE, UNDELIVERED
    return (UNDELIVERED,) if least < most or unheard else ()


# Notices of clouds and autoscalers.


@_kind("gke-spot", "SpotTermination", workloads=EVERY)
def _gke_spot(scene: Scene) -> Iterator[None]:
    """GKE's taint on a spot node that is taken back."""
    nodes.taint(scene.cluster, scene.pod.node)
    yield
    nodes.untaint(scene.cluster, scene.pod.node)


@_kind("aws-spot", "SpotTermination", workloads=BOTH)
def _aws_spot(scene: Scene) -> Iterator[None]:
    """AWS's handler taints the node two minutes ahead, and evicts its pods."""
    yield from _tainted_and_evicted(scene, _SPOT_ITN)


@_kind("aws-scale-in", "ScaleDown")
def _aws_scale_in(scene: Scene) -> Iterator[None]:
    """An Auto Scaling group ends the machine: taint and eviction."""
    yield from _tainted_and_evicted(scene, nodes.SCALE_DOWN_TAINT["key"])


@_kind("autoscaler", "ScaleDown", workloads=BOTH)
def _autoscaler(scene: Scene) -> Iterator[None]:
    """The cluster autoscaler marks the node, and evicts its pods."""
    yield from _tainted_and_evicted(scene, _SCALE_DOWN, str(int(time.time())))


def _tainted_and_evicted(scene: Scene, key: str, value: str = "") -> Iterator[None]:
    nodes.taint(
        scene.cluster, scene.pod.node, {"key": key, "effect": "NoSchedule"} | ({"value": value} if value else {})
    )
    for pod in scene.pods:
        if pod.node == scene.pod.node:
            _evict(scene, pod)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, key)


def _why_no_karpenter() -> str | None:
    if parts.missing((_KARPENTER,)):
        return f"{_KARPENTER} is not built (python -m tests.testcluster build --parts {_KARPENTER})"
    return None


# Karpenter makes its nodes itself, so that it cannot know these. The NodeClaim is the kind's own, of Karpenter's CRD,
# and what is done is what Karpenter's controllers do, one after another.
@_kind("karpenter-nodeclaim", "ScaleDown", own_cluster=True, why_not=_why_no_karpenter)
def _karpenter_nodeclaim(scene: Scene) -> Iterator[None]:
    """Karpenter deletes an on-demand node's NodeClaim, taints the node, evicts its pods and ends the machine."""
    cluster, node = scene.cluster, scene.pod.node
    claim = f"claim-{time.time():.0f}"
    _define_claims(scene)
    try:
        held = {"finalizers": [_CLAIM_FINALIZER], "ownerReferences": [_claim_node(scene, claim)]}
        cluster.kubectl("patch", "node", node, "--type=merge", "--patch", json.dumps({"metadata": held}))
        # Elsewhere a claim is there for long before. No replica tells which claims it has seen, so this is not certain.
        time.sleep(_DOWN_S)
        scene.since_s = time.time()
        cluster.kubectl("delete", f"{_CLAIMS}/{claim}", "--wait=false")
        cluster.kubectl("delete", f"node/{node}", "--wait=false")
        nodes.taint(cluster, node, {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"})
        for namespace, name in _evictable(scene):
            _evict_named(cluster, namespace, name)
        _wait_for_end_of(scene, *(pod for pod in scene.pods if pod.node == node))
    finally:
        cluster.lose_node(node)
        release_nodes(cluster, node)
    yield
    _bring(scene)


def release_nodes(cluster: Cluster, *names: str) -> None:
    """Takes off nodes and all NodeClaims what holds them, whereupon those go that are deleted, and deletes the claims.

    Args:
        cluster: The cluster, which need not know NodeClaims.
        names: Of the nodes, which need not have an object.
    """

    def found(*query: str) -> list[str]:
        return cluster.kubectl("get", *query, "--ignore-not-found", "--output=name").stdout.split()

    claims = found(_CLAIMS) if found(f"crd/{_CLAIMS}") else []
    for each in (*found("node", *names), *claims):  # the nodes first: the garbage collector deletes those of no claim
        free = '{"metadata": {"finalizers": null, "ownerReferences": null}}'
        cluster.kubectl("patch", each, "--type=merge", "--patch", free)
    if claims:
        cluster.kubectl("delete", *claims, "--ignore-not-found")


def _define_claims(scene: Scene) -> None:
    """Installs the CRD of NodeClaims, and waits until all replicas of the operator watch them."""
    crds = parts.manifests(_KARPENTER, "pkg/apis/crds")
    scene.cluster.kubectl("apply", "--server-side", "--filename", str(crds / "karpenter.sh_nodeclaims.yaml"))
    wait_for_definitions(scene.cluster.kubectl, _CLAIMS)

    def watched() -> bool:
        replicas = operator.by_replica(scene.cluster)
        return bool(replicas) and all(_CLAIMS_WATCHED in replica for replica in replicas)

    wait_until("all replicas of the operator to watch NodeClaims", watched, timeout_s=_KEPT_S, every_s=1)


def _claim_node(scene: Scene, name: str) -> Json:
    """Makes the NodeClaim of a node; returns the node's reference to it."""
    kind = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim"}
    capacity = "karpenter.sh/capacity-type"
    body = {
        **kind,
        "metadata": {"name": name, "labels": {capacity: "on-demand"}, "finalizers": [_CLAIM_FINALIZER]},
        "spec": {
            "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
            "requirements": [{"key": capacity, "operator": "In", "values": ["on-demand"]}],
            "expireAfter": "Never",
        },
    }
    made = scene.cluster.kubectl("create", "-f", "-", "--output=json", stdin=json.dumps(body)).stdout
    status = json.dumps({"status": {"nodeName": scene.pod.node}})
    scene.cluster.kubectl(
        *("patch", f"{_CLAIMS}/{name}", "--subresource=status", "--type=merge", "--patch", status),
    )
    return {**kind, "name": name, "uid": json.loads(made)["metadata"]["uid"], "blockOwnerDeletion": True}


def _evictable(scene: Scene) -> list[tuple[str, str]]:
    """Namespaces and names of the pods on the node but for those of DaemonSets, the trainers first."""
    query = ("get", "pods", "--all-namespaces", f"--field-selector=spec.nodeName={scene.pod.node}", "--output=json")
    found = [
        (item["metadata"]["namespace"], item["metadata"]["name"])
        for item in json.loads(scene.cluster.kubectl(*query).stdout)["items"]
        if item["status"].get("phase") in ("Pending", "Running")
        and not any(owner["kind"] in ("DaemonSet", "Node") for owner in item["metadata"].get("ownerReferences", []))
    ]
    return sorted(found, key=lambda pod: pod[0] != scene.run.namespace)


@_kind("aks-spot", "SpotTermination")
def _aks_spot(scene: Scene) -> Iterator[None]:
    """AKS's condition of the node: a Spot machine is taken back in half a minute, and is cordoned by auto-drain."""
    scene.cluster.kubectl("cordon", scene.pod.node)
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    _condition(scene.cluster, scene.pod.node, "True", f"Preempt Scheduled: {at:%a, %d %b %Y %H:%M:%S} GMT")
    yield
    _condition(scene.cluster, scene.pod.node, "False", _NO_EVENT)
    scene.cluster.kubectl("uncordon", scene.pod.node)


def call_off_event(cluster: Cluster, node: str) -> None:
    """Takes AKS's condition of a node back if it says that the machine is taken back."""
    path = f'--output=jsonpath={{.status.conditions[?(@.type=="{_VM_EVENT}")].status}}'
    if cluster.kubectl("get", "node", node, path).stdout.strip() == "True":
        _condition(cluster, node, "False", _NO_EVENT)


def _condition(cluster: Cluster, node: str, status: str, message: str) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = {"type": _VM_EVENT, "status": status, "reason": _VM_EVENT, "message": message}
    entry |= {"lastTransitionTime": now, "lastHeartbeatTime": now}
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        body = {"status": {"conditions": [entry]}}
        client.CoreV1Api(connection).patch_node_status(node, body, _request_timeout=30)


@_kind("metadata", "SpotTermination", records=(0, 1), workloads=BOTH, own_cluster=True)
def _metadata(scene: Scene) -> Iterator[None]:
    """The cloud's metadata server says that the machine is preempted; the operator sees no signal."""
    saved = _saved_once_more(scene.run)
    server = scene.metadata[scene.pod.node]
    server.set("instance/preempted", "TRUE")
    try:
        saved()
    finally:
        server.set("instance/preempted", "FALSE")  # the machine that comes in its place
    yield


@_kind("maintenance-begins", "Maintenance")
def _maintenance_begins(scene: Scene) -> Iterator[None]:
    """GKE's label of a maintenance that has begun, with the cordon of the node."""
    scene.cluster.kubectl("cordon", scene.pod.node)
    scene.cluster.kubectl("label", "node", scene.pod.node, f"{ACTIVE_MAINTENANCE}=ONGOING")
    yield
    scene.cluster.kubectl("label", "node", scene.pod.node, f"{ACTIVE_MAINTENANCE}-")
    scene.cluster.kubectl("uncordon", scene.pod.node)


# Nothing keeps the pods off a node with a scheduled maintenance if they want to be spread: they hear of it once more,
# save, and train on there.
@_kind("maintenance-in-a-minute", "Maintenance", records=(1, 2), workloads=BOTH)
def _maintenance_in_a_minute(scene: Scene) -> Iterator[None]:
    """A maintenance that is scheduled a minute ahead."""
    asking.schedule(scene.cluster, _SOON_S, scene.pod.node)
    yield
    asking.call_off(scene.cluster)


@_kind("maintenance-moved", "Maintenance", records=(1, 2))
def _maintenance_moved(scene: Scene) -> Iterator[None]:
    """A maintenance in three hours is moved to the next half an hour, and then to the next minute."""
    known = asking.names(scene.run)
    asking.schedule(scene.cluster, _HOURS_S, scene.pod.node)
    time.sleep(_DOWN_S)
    asking.schedule(scene.cluster, _LATER_S, scene.pod.node)
    asking.fresh(scene.run, known)
    scene.since_s = time.time()
    asking.schedule(scene.cluster, _SOON_S, scene.pod.node)
    yield
    asking.call_off(scene.cluster)


@_kind("maintenance-called-off", "Maintenance", then=Then.GOES_ON, phases=(Phase.RETRACTED,), workloads=BOTH)
def _maintenance_called_off(scene: Scene) -> Iterator[None]:
    """A maintenance in half an hour, of which the job is told, is called off."""
    known = asking.names(scene.run)
    asking.schedule(scene.cluster, _LATER_S, scene.pod.node)
    asking.fresh(scene.run, known)
    asking.call_off(scene.cluster)
    yield


# What people, controllers and the scheduler do.


@_kind("drain", "Drain", workloads=EVERY)
def _drain(scene: Scene) -> Iterator[None]:
    """kubectl drain of the node."""
    scene.cluster.kubectl(
        *("drain", scene.pod.node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
        *(f"--pod-selector={scene.run.form.name_label}={scene.run.name}", f"--timeout={_DRAIN_S}s"),
        timeout_s=_DRAIN_S + 10,
    )
    yield
    scene.cluster.kubectl("uncordon", scene.pod.node)


@_kind("eviction", "Drain", workloads=BOTH)
def _eviction(scene: Scene) -> Iterator[None]:
    """One pod is evicted by the API."""
    _evict(scene, scene.pod)
    yield


def _evict(scene: Scene, pod: Pod) -> None:
    _evict_named(scene.cluster, scene.run.namespace, pod.name)


def _evict_named(cluster: Cluster, namespace: str, name: str) -> None:
    """Asks as kubectl drain does: again and again, until the eviction is done or the pod is gone."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    meta = {"name": name, "namespace": namespace}
    body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})

    def done() -> bool:
        said = cluster.kubectl("create", "--raw", path, "-f", "-", stdin=body, check=False)
        return said.returncode == 0 or "not found" in said.stderr

    wait_until(f"the eviction of {name}", done, timeout_s=_PODS_GONE_S, every_s=1)


@_kind("pod-deleted", "PodDeletion", workloads=ON_ALL_NODES)
def _pod_deleted(scene: Scene) -> Iterator[None]:
    """A pod is deleted."""
    _delete(scene)
    yield


def _delete(scene: Scene, pod: Pod | None = None) -> None:
    name = (pod or scene.pod).name
    scene.cluster.kubectl("delete", "pod", name, scene.in_namespace, "--wait=false")


@_kind("suspended", "Suspension", workloads=BOTH)
def _suspended(scene: Scene) -> Iterator[None]:
    """The workload is suspended, and resumed when its pods are gone."""
    _suspend(scene, True)
    _wait_without_pods(scene)
    _suspend(scene, False)
    yield


def _suspend(scene: Scene, suspended: bool) -> None:
    scene.cluster.kubectl(
        *("patch", f"{scene.run.form.resource}/{scene.run.name}", scene.in_namespace),
        *("--type=merge", "--patch", json.dumps({"spec": {"suspend": suspended}})),
    )


def _wait_without_pods(scene: Scene) -> None:
    def gone() -> bool:
        return not any(pod.phase in ("Pending", "Running") for pod in scene.run.look().pods)

    wait_until(f"the pods of {scene.run.name} to go", gone, timeout_s=_PODS_GONE_S, every_s=0.5)


@_kind("kueue-preemption", "PriorityPreemption", workloads=(trace.QUEUED,), own_cluster=True)
def _kueue_preemption(scene: Scene) -> Iterator[None]:
    """A Job of higher priority takes the quota of Kueue's queue, and gives it back when the pods are gone."""
    cluster, namespace = scene.cluster, scene.run.namespace
    queues.occupant(cluster, scene.image, TAKER, round(_PODS_GONE_S + _STARTED_S), namespace=namespace)
    _wait_without_pods(scene)
    ready = ("get", f"jobs.batch/{TAKER}", scene.in_namespace, "--output=jsonpath={.status.ready}")
    wait_until(
        "the Job of higher priority to run",
        lambda: cluster.kubectl(*ready).stdout.strip() == "1",
        timeout_s=_STARTED_S,
        every_s=1,
        hint=lambda: f"\n{scene.run.look().describe()}",
    )
    cluster.kubectl("delete", f"jobs.batch/{TAKER}", scene.in_namespace)
    yield


@_kind("priority", "PriorityPreemption")
def _priority(scene: Scene) -> Iterator[None]:
    """A pod of higher priority needs the processors of the node that trainers have."""
    name = "urgent"
    container = {
        "name": "main",
        "image": scene.image,
        "imagePullPolicy": "IfNotPresent",
        "command": _SLEEP,
        "resources": {"requests": {"cpu": f"{_processors_beside(scene)}m"}},
    }
    spec = {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/hostname": scene.pod.node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    scene.cluster.kubectl("create", scene.in_namespace, "-f", "-", stdin=json.dumps(body))
    yield
    scene.cluster.kubectl("delete", "pod", name, scene.in_namespace, "--force", "--grace-period=0")


def _processors_beside(scene: Scene) -> int:
    """What the node has for pods, less what others than trainers requested, in thousandths of a processor."""
    query = ("get", "--output=json")
    node = json.loads(scene.cluster.kubectl(*query, "node", scene.pod.node).stdout)
    running = f"--field-selector=spec.nodeName={scene.pod.node},status.phase!=Succeeded,status.phase!=Failed"
    pods = json.loads(scene.cluster.kubectl(*query, "pods", "--all-namespaces", running).stdout)["items"]
    others = [pod for pod in pods if pod["metadata"].get("labels", {}).get(scene.run.form.name_label) != scene.run.name]
    taken = [
        each.get("resources", {}).get("requests", {}).get("cpu", "0") for pod in others for each in _containers(pod)
    ]
    return _thousandths(node["status"]["allocatable"]["cpu"]) - sum(map(_thousandths, taken))


def _containers(pod: Json) -> list[Json]:
    """Those that run all the time: also the init containers that restart."""
    spec = pod["spec"]
    return [*spec["containers"], *(each for each in spec.get("initContainers", []) if "restartPolicy" in each)]


def _thousandths(quantity: str) -> int:
    return int(quantity[:-1]) if quantity.endswith("m") else int(float(quantity) * 1000)


@_kind("no-execute", "NodeTaint")
def _no_execute(scene: Scene) -> Iterator[None]:
    """A taint by which Kubernetes ends the node's pods."""
    nodes.taint(scene.cluster, scene.pod.node, {"key": _MOVED_OUT, "effect": "NoExecute"})
    yield
    nodes.untaint(scene.cluster, scene.pod.node, _MOVED_OUT)


@_kind("request", "Rehearsal", workloads=BOTH)
def _request(scene: Scene) -> Iterator[None]:
    """A PreemptionRequest, as of a tool of one's own."""
    name = asking.ask(scene.run, f"leave-{time.time():.0f}", cause="Rehearsal", deadlineSeconds=30)
    yield
    scene.cluster.kubectl("delete", f"{asking.REQUESTS}/{name}", scene.in_namespace, "--ignore-not-found")


@_kind("drill", "Rehearsal", then=Then.GOES_ON, workloads=BOTH)
def _drill(scene: Scene) -> Iterator[None]:
    """A drill: all but the exit."""
    name = asking.ask(scene.run, f"drill-{time.time():.0f}", mode="Drill", cause="Rehearsal", deadlineSeconds=30)
    asking.answer(scene.run, name, "Committed")
    yield
    scene.cluster.kubectl("delete", f"{asking.REQUESTS}/{name}", scene.in_namespace, "--ignore-not-found")


@_kind("sigterm", "PodDeletion", workloads=BOTH, own_cluster=True)
def _sigterm(scene: Scene) -> Iterator[None]:
    """A process gets SIGTERM; the operator sees no signal, and hears of it from the gang."""
    machine.trainer_process(scene.run, scene.pod.name).terminate()
    yield


@_kind("node-shutdown", "NodeShutdown", own_cluster=True)
def _node_shutdown(scene: Scene) -> Iterator[None]:
    """The machine is shut down, as its kubelet hears from logind."""
    with operator.outliving(scene.cluster), machine.local(scene.cluster).shutting_down(scene.pod.node):
        yield


@_kind("node-unreachable", "NodeLost", own_cluster=True)
def _node_unreachable(scene: Scene) -> Iterator[None]:
    """The kubelet is silent until the node counts as unreachable; its containers run on."""
    known = asking.names(scene.run)
    with machine.local(scene.cluster).silenced(scene.pod.node):
        asking.ended(scene.run, asking.fresh(scene.run, known)["metadata"]["name"], Phase.COMMITTED)
    yield


# Notices at the wrong moment, and while something else is wrong.


@_kind("two-notices", "ScaleDown", "PodDeletion", records=(1, 2))
def _two_notices(scene: Scene) -> Iterator[None]:
    """One process's node is tainted, and the other process's pod is deleted at once."""
    other = next(pod for pod in scene.pods if pod.name != scene.pod.name)
    nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)
    _delete(scene, other)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


@_kind("notice-at-start", "PodDeletion", records=(1, 2), phases=())
def _notice_at_start(scene: Scene) -> Iterator[None]:
    """A pod is deleted, and again as soon as its processes have started anew."""
    _restart_until(scene, trainer.BEGAN)
    _delete_anew(scene)
    yield


@_kind("notice-at-restore", "PodDeletion", records=(1, 2), phases=())
def _notice_at_restore(scene: Scene) -> Iterator[None]:
    """A pod is deleted, and again as soon as the processes have found each other."""
    _restart_until(scene, "attached process=")
    _delete_anew(scene)
    yield


@_kind("notice-at-compile", "PodDeletion", records=(1, 2), phases=())
def _notice_at_compile(scene: Scene) -> Iterator[None]:
    """A pod is deleted, and again when the processes have restored, and JAX compiles for some more seconds."""
    program = scene.run.output / trainer.PROGRAM
    program.write_text(str(_OPERATIONS))
    try:
        _restart_until(scene, "resumed restored_step=")
    finally:
        program.unlink()
    _delete_anew(scene)
    anew = scene.old - {pod.name for pod in scene.pods}
    if trained := anew & _that_said(scene.run, "resumed restored_step=", "training=True"):
        raise AssertionError(f"expected JAX to compile when the pod was deleted, found that {trained} trained")
    yield


def _restart_until(scene: Scene, words: str) -> None:
    """Deletes a pod, and waits until the processes that start anew have logged what begins so."""
    old = {pod.name for pod in scene.pods}
    _delete(scene)
    wait_until(
        f"{words} of both processes",
        lambda: len(_that_said(scene.run, words) - old) >= len(old),
        timeout_s=_STARTED_S,
        every_s=0.1,
    )


def _delete_anew(scene: Scene) -> None:
    """Deletes the pod that came in the place of the scene's."""
    scene.since_s = time.time()
    started = scene.run.wait_for_pods()
    scene.old |= {pod.name for pod in started}
    _delete(scene, next(pod for pod in started if pod.process == scene.pod.process))


def _that_said(run: TrainingRun, begin: str, end: str = "") -> set[str]:
    """The names of the pods whose processes have logged something that begins and ends so."""
    return {
        pod
        for pod, lines in account.read_words(run.output).items()
        if any(line.message.startswith(begin) and line.message.endswith(end) for line in lines)
    }


@_kind("notice-at-save", "ScaleDown")
def _notice_at_save(scene: Scene) -> Iterator[None]:
    """A taint as soon as a periodic save has begun."""
    due = (asking.newest_step(scene.run) // EVERY_STEPS + 1) * EVERY_STEPS
    scene.run.wait_for_step(due)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)


@_kind(
    "notice-at-drill",
    "Rehearsal",
    "ScaleDown",
    records=(2, 2),
    phases=(Phase.COMMITTED, Phase.RETRACTED),
    workloads=BOTH,
)
def _notice_at_drill(scene: Scene) -> Iterator[None]:
    """A taint as soon as a drill is under way, which it ends or follows."""
    known = asking.names(scene.run)
    name = asking.ask(scene.run, f"drill-{time.time():.0f}", mode="Drill", cause="Rehearsal", deadlineSeconds=30)
    asking.fresh(scene.run, known)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)
    scene.cluster.kubectl("delete", f"{asking.REQUESTS}/{name}", scene.in_namespace, "--ignore-not-found")


def _tainted_for_long(scene: Scene) -> Iterator[None]:
    """A taint that leaves the pods their whole grace period."""
    nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


@_kind("operator-killed-before-notice", "ScaleDown", unheard=True, workloads=BOTH, own_cluster=True)
def _operator_killed_before_notice(scene: Scene) -> Iterator[None]:
    """Both replicas of the operator are killed, and a node is tainted."""
    _kill_operator(scene)
    yield from _tainted_for_long(scene)


def _kill_operator(scene: Scene) -> None:
    """Kills both replicas; returns when they are dead.

    One that is only deleted by force still notifies for a second or two, but the API server takes no more writes of it:
    nobody would know of a signal that comes then.
    """
    processes = [each for pod in _operator_pods(scene) for each in machine.processes_in(pod, "gracepoint_operator")]
    operator.restart_abruptly(scene.cluster)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, living = psutil.wait_procs(processes, timeout=_PODS_GONE_S)
    if living:
        raise AssertionError(f"expected the operator's processes to end, found {living} after {_PODS_GONE_S:.0f} s")


@_kind("operator-killed-in-notice", "ScaleDown", unheard=True, own_cluster=True)
def _operator_killed_in_notice(scene: Scene) -> Iterator[None]:
    """Both replicas are killed after a process has got the notice, while the other one does nothing."""
    other = next(pod for pod in scene.pods if pod.name != scene.pod.name)
    known = asking.names(scene.run)
    with machine.paused(scene.run, other.name):
        nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)
        asking.fresh(scene.run, known)
        operator.restart_abruptly(scene.cluster)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


@_kind(
    "operator-away",
    "PodDeletion",
    records=(0, 1),
    phases=(),
    unheard=True,
    workloads=BOTH,
    own_cluster=True,
    alerts=("GracepointDown",),
)
def _operator_away(scene: Scene) -> Iterator[None]:
    """No operator runs, and a pod is deleted: its SIGTERM is the only notice."""
    with operator.stopped(scene.cluster):
        scene.since_s = time.time()
        _delete(scene)
        yield


@_kind("operator-unreachable-at-notice", "PodDeletion", unheard=True, own_cluster=True)
def _operator_unreachable_at_notice(scene: Scene) -> Iterator[None]:
    """The network between the processes and the operator is cut, and a pod is deleted."""
    with _cut_off_operator(scene):
        _delete(scene)
        _wait_for_end_of(scene, scene.pod)
    yield


def _wait_for_end_of(scene: Scene, *pods: Pod, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Waits until the processes of pods have ended. ``meanwhile`` is called several times a second."""
    names = {pod.name for pod in pods}

    def ended() -> bool:
        meanwhile()
        return not any(pod.name in names and pod.phase == "Running" for pod in scene.run.look().pods)

    wait_until(f"the end of {', '.join(sorted(names))}", ended, timeout_s=_PODS_GONE_S, every_s=0.2)


@_kind("api-server-away-before-notice", "ScaleDown", workloads=BOTH, own_cluster=True)
def _api_server_away_before_notice(scene: Scene) -> Iterator[None]:
    """The API server is killed, comes back after some seconds, and a node is tainted."""
    machine.restart_api_server(scene.cluster, down_s=_DOWN_S)
    yield from _tainted_for_long(scene)


@_kind("api-server-slow-at-notice", "ScaleDown", own_cluster=True)
def _api_server_slow_at_notice(scene: Scene) -> Iterator[None]:
    """The API server has little processor time, and a node is tainted."""
    with machine.slow_api_server(scene.cluster) as held_back_s:
        _wait_until_slow(scene, held_back_s)
        scene.since_s = time.time()
        nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)
        _wait_for_end_of(scene, *scene.pods)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


@_kind("api-server-restored-before-notice", "ScaleDown", own_cluster=True)
def _api_server_restored_before_notice(scene: Scene) -> Iterator[None]:
    """The API server goes back to a copy that is ten seconds old, and a node is tainted."""
    _restore_api_server(scene)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)


def _restore_api_server(scene: Scene) -> None:
    """Goes back, and lets the controllers start anew that have seen later versions, as those who restore etcd must."""
    with machine.local(scene.cluster).forgetting():
        time.sleep(AWAY_S)
    _kill_jobset_controller(scene)
    _wait_for_jobset_controller(scene)


@_kind("authority-changed-before-notice", "ScaleDown", unheard=True, own_cluster=True)
def _authority_changed_before_notice(scene: Scene) -> Iterator[None]:
    """The operator gets a new authority, both replicas are killed, and a node is tainted."""
    _change_authority(scene)
    _kill_operator(scene)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)


@_kind("jobset-controller-killed", "PodDeletion", own_cluster=True)
def _jobset_controller_killed(scene: Scene) -> Iterator[None]:
    """JobSet's controller is killed, and a pod is deleted."""
    _kill_jobset_controller(scene)
    _delete(scene)
    yield
    _wait_for_jobset_controller(scene)


def _kill_jobset_controller(scene: Scene) -> None:
    scene.cluster.kubectl(
        *("delete", "pod", "--all", f"--namespace={_JOBSET_NAMESPACE}", "--force", "--grace-period=0")
    )


def _wait_for_jobset_controller(scene: Scene) -> None:
    wait_for_rollout(scene.cluster, "deployment/jobset-controller-manager", namespace=_JOBSET_NAMESPACE, timeout_s=120)


# What keeps pods from their first step (docs/restarts.md).


@_kind("no-node", "PodDeletion")
def _no_node(scene: Scene) -> Iterator[None]:
    """A pod is deleted while no node takes pods, for a while."""
    scene.cluster.kubectl("cordon", *scene.nodes)
    _delete_and_wait(scene)
    scene.cluster.kubectl("uncordon", *scene.nodes)
    yield


@_kind("no-quota", "PodDeletion")
def _no_quota(scene: Scene) -> Iterator[None]:
    """A pod is deleted while the namespace's quota of pods is used up, for a while."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    scene.cluster.kubectl("create", scene.in_namespace, "-f", "-", stdin=json.dumps(quota))
    _delete_and_wait(scene)
    scene.cluster.kubectl("delete", "resourcequota/none", scene.in_namespace)
    yield


@_kind("webhook-away", "PodDeletion")
def _webhook_away(scene: Scene) -> Iterator[None]:
    """A pod is deleted while the webhook of another project, which is away, refuses pods."""
    webhook = {
        "name": "pods.foreign.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.run.namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "foreign"},
        "webhooks": [webhook],
    }
    scene.cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    _delete_and_wait(scene)
    scene.cluster.kubectl("delete", f"{_WEBHOOKS}/foreign")
    yield


@_kind("no-address", "PodDeletion", own_cluster=True, holds_up=True)
def _no_address(scene: Scene) -> Iterator[None]:
    """A pod is deleted while no node has an address left for a pod, for a while."""
    with machine.local(scene.cluster).without_addresses() as take_freed:
        _delete_and_wait(scene, take_freed)
    yield


@_kind("no-image", "PodDeletion", own_cluster=True, holds_up=True)
def _no_image(scene: Scene) -> Iterator[None]:
    """A pod is deleted while no node has the trainers' image, which cannot be pulled, for a while."""
    with machine.local(scene.cluster).without_image(scene.image):
        _delete_and_wait(scene)
    yield


@_kind("no-secret", "PodDeletion", workloads=(trace.BUCKET,), own_cluster=True, holds_up=True)
def _no_secret(scene: Scene) -> Iterator[None]:
    """A pod is deleted while the Secret with the keys of the store is gone, for a while."""
    secret = ("secret", STORE_SECRET, scene.in_namespace)
    kept = json.loads(scene.cluster.kubectl("get", *secret, "--output=json").stdout)
    kept["metadata"] = {"name": STORE_SECRET, "namespace": scene.run.namespace}
    scene.cluster.kubectl("delete", *secret)
    try:
        _delete_and_wait(scene)
    finally:
        scene.cluster.kubectl("create", "-f", "-", stdin=json.dumps(kept))
    yield


def _delete_and_wait(scene: Scene, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Deletes a pod, and waits until all have ended, and a while longer, in which no process may start.

    Args:
        scene: What it is done to.
        meanwhile: Called several times a second.

    Raises:
        AssertionError: A process started.
    """
    before = _that_said(scene.run, trainer.BEGAN)
    _delete(scene)
    _wait_for_end_of(scene, *scene.pods, meanwhile=meanwhile)
    until_s = time.monotonic() + AWAY_S
    while time.monotonic() < until_s:
        meanwhile()
        time.sleep(0.2)
    if started := _that_said(scene.run, trainer.BEGAN) - before:
        raise AssertionError(f"expected no process to start meanwhile, found that those of {started} did")


@_kind("clock-ahead-at-notice", "SpotTermination", workloads=BOTH, own_cluster=True, why_not=clocks.why_not)
def _clock_ahead_at_notice(scene: Scene) -> Iterator[None]:
    """The clock of process 1's machine jumps an hour ahead, and the node gets GKE's taint of a spot node."""
    yield from _wrong_at_notice(scene, _WRONG_S)


@_kind("clock-behind-at-notice", "SpotTermination", workloads=BOTH, own_cluster=True, why_not=clocks.why_not)
def _clock_behind_at_notice(scene: Scene) -> Iterator[None]:
    """The clock of process 1's machine jumps back by an hour, and the node gets GKE's taint of a spot node."""
    yield from _wrong_at_notice(scene, -_WRONG_S)


def _wrong_at_notice(scene: Scene, ahead_s: float) -> Iterator[None]:
    pod = next(pod for pod in scene.pods if pod.process == 1)
    with _clock_ahead(scene, pod, ahead_s) as process:
        time.sleep(_DOWN_S)
        scene.since_s = time.time()
        nodes.taint(scene.cluster, pod.node)
        _wait_for_end_of_process(process, pod)  # that of the machine in its place is right
    yield
    nodes.untaint(scene.cluster, pod.node)


@contextlib.contextmanager
def _clock_ahead(scene: Scene, pod: Pod, seconds: float) -> Iterator[psutil.Process]:
    """The time of day that the process of a pod is told is wrong inside of this. Yields the process."""
    process = machine.trainer_process(scene.run, pod.name)
    if not clocks.is_followed(process.pid, pod.process):
        raise AssertionError(f"expected the process of {pod.name} to go by a clock of the replay's, found its own one")
    folder = scene.cluster.shared_dir / "replay"
    clocks.set_ahead(folder, pod.process, seconds)
    try:
        yield process
    finally:
        clocks.set_ahead(folder, pod.process, 0.0)


def _wait_for_end_of_process(process: psutil.Process, pod: Pod) -> None:
    wait_until(f"the process of {pod.name} to end", lambda: not process.is_running(), timeout_s=_PODS_GONE_S)


# What nobody announces, and ends processes.


@_kind(
    "node-off",
    "NodeLost",
    announced=False,
    records=(0, 2),
    phases=(),
    workloads=(trace.JOBSET, trace.BUCKET),
    own_cluster=True,
)
def _node_off(scene: Scene) -> Iterator[None]:
    """A machine is off, without a goodbye; the cloud deletes its Node."""
    _note_operator(scene)
    scene.cluster.lose_node(scene.pod.node, delete_object=True)
    yield
    _bring(scene)


# What the fresh machine says of containers that it does not know, a Job cannot tell from an error of the program
# (docs/restarts.md). If process 0 was there, the other one gets a SIGTERM that it cannot tell anybody: it ends when it
# takes process 0 for dead, or with its grace period.
@_kind("node-rebooted", "NodeLost", announced=False, records=(0, 2), phases=(), counted=1, own_cluster=True)
def _node_rebooted(scene: Scene) -> Iterator[None]:
    """A machine is off, without a goodbye, and a fresh one of its name comes at once."""
    _note_operator(scene)
    scene.cluster.lose_node(scene.pod.node)
    _bring(scene)
    yield


def _note_operator(scene: Scene) -> None:
    """Notes whether a replica of the operator runs on the node: the others may not know to which step training came."""
    there = _addresses(scene.cluster, OPERATOR_NAMESPACE, _OPERATOR, node=scene.pod.node)
    scene.unheard = bool(there)


def _bring(scene: Scene) -> None:
    scene.cluster.restore_node(scene.pod.node, timeout_s=180)
    prepare(scene.cluster, scene.pod.node)


@_kind("pod-killed", "PodDeletion", announced=False, records=(0, 1), phases=(), counted=1)
def _pod_killed(scene: Scene) -> Iterator[None]:
    """A pod is deleted by force, without a grace period."""
    scene.cluster.kubectl(
        *("delete", "pod", scene.pod.name, scene.in_namespace, "--force", "--grace-period=0", "--wait=false")
    )
    yield


def _killed(scene: Scene, *processes: int) -> Iterator[None]:
    found = [machine.trainer_process(scene.run, pod.name) for pod in scene.pods if pod.process in processes]
    for process in found:  # all are known before the first one goes, as the others end once they miss it
        process.kill()
    yield


@_kind("process-0-killed", announced=False, counted=1, workloads=(*WITH_BUCKET, trace.KEPT), own_cluster=True)
def _process_0_killed(scene: Scene) -> Iterator[None]:
    """Process 0, by which the others find each other, is killed."""
    yield from _killed(scene, 0)


@_kind("process-1-killed", announced=False, counted=1, workloads=(*WITH_BUCKET, trace.KEPT), own_cluster=True)
def _process_1_killed(scene: Scene) -> Iterator[None]:
    """Another process is killed."""
    yield from _killed(scene, 1)


@_kind("all-processes-killed", announced=False, counted=1, own_cluster=True)
def _all_processes_killed(scene: Scene) -> Iterator[None]:
    """All processes are killed at once."""
    yield from _killed(scene, *(pod.process for pod in scene.pods))


# JAX's coordination service, which is in process 0, takes processes for dead by the time of day (docs/guarantees.md).
@_kind("clock-jumps-at-process-0", announced=False, counted=1, own_cluster=True, why_not=clocks.why_not)
def _clock_jumps_at_process_0(scene: Scene) -> Iterator[None]:
    """The clock of process 0's machine jumps an hour ahead, whereupon JAX ends all processes."""
    pod = next(pod for pod in scene.pods if pod.process == 0)
    with _clock_ahead(scene, pod, _WRONG_S) as process:
        _wait_for_end_of_process(process, pod)
    yield


@_kind("out-of-memory", announced=False, counted=1, own_cluster=True)
def _out_of_memory(scene: Scene) -> Iterator[None]:
    """A process takes more memory than its container may have, and the kernel kills it."""
    machine.trainer_process(scene.run, scene.pod.name).send_signal(trainer.TAKE_MEMORY)
    yield


# What nobody announces, and training outlives.


@_kind("clock-jumps", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True, why_not=clocks.why_not)
def _clock_jumps(scene: Scene) -> Iterator[None]:
    """The clock of process 1's machine is an hour ahead for ten seconds, then an hour behind; saves go on."""
    pod = next(pod for pod in scene.pods if pod.process == 1)
    for ahead_s in (_WRONG_S, -_WRONG_S):
        with _clock_ahead(scene, pod, ahead_s):
            _wait_for_save(scene.run)
    yield


def _wait_for_save(run: TrainingRun) -> None:
    """Waits ten seconds, and longer if no other save than now is complete then."""

    def newest() -> int:
        return max(checks.complete_steps(run.checkpoints), default=0)

    before = newest()
    time.sleep(AWAY_S)
    wait_until(f"a save of {run.name}", lambda: newest() > before, timeout_s=_PODS_GONE_S)


@_kind("process-frozen", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _process_frozen(scene: Scene) -> Iterator[None]:
    """A process is stopped for some seconds."""
    with machine.paused(scene.run, scene.pod.name):
        time.sleep(_FROZEN_S)
    yield


@_kind("kubelet-restarted", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _kubelet_restarted(scene: Scene) -> Iterator[None]:
    """A node's kubelet is killed, and started again."""
    machine.local(scene.cluster).restart_kubelet(scene.pod.node, down_s=_DOWN_S)
    yield


@_kind("runtime-restarted", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _runtime_restarted(scene: Scene) -> Iterator[None]:
    """A node's containerd is killed, and started again."""
    machine.local(scene.cluster).restart_containerd(scene.pod.node, down_s=_DOWN_S)
    yield


@_kind("api-server-away", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _api_server_away(scene: Scene) -> Iterator[None]:
    """The API server is killed, and away for ten seconds."""
    machine.restart_api_server(scene.cluster, down_s=AWAY_S)
    yield


@_kind("api-server-slow", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _api_server_slow(scene: Scene) -> Iterator[None]:
    """The API server has little processor time for twenty seconds."""
    with machine.slow_api_server(scene.cluster) as held_back_s:
        _wait_until_slow(scene, held_back_s)
        time.sleep(_SLOW_S)
    yield


def _wait_until_slow(scene: Scene, held_back_s: Callable[[], float]) -> None:
    """Asks the API server until it is known to be slow."""

    def is_slow() -> bool:
        scene.cluster.kubectl("get", "nodes")
        return held_back_s() >= _HELD_BACK_S

    wait_until(
        "the API server to be slow",
        is_slow,
        timeout_s=_SLOW_S,
        every_s=0.1,
        hint=lambda: f"\nit could not run for {held_back_s():.2f} s",
    )


@_kind("api-server-restored", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _api_server_restored(scene: Scene) -> Iterator[None]:
    """The API server goes back to a copy that is ten seconds old."""
    _restore_api_server(scene)
    yield


@_kind("authority-changed", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _authority_changed(scene: Scene) -> Iterator[None]:
    """The operator's authority comes to its last year, and the operator adds another one."""
    _change_authority(scene)
    yield


def _change_authority(scene: Scene) -> None:
    """Adds the same authority with fewer days to the Secret, and waits until pods are told of the one that follows."""
    now = time.time()
    authorities = OwnCertificates.of(_certificates(scene)).authorities
    state = OwnCertificates((*authorities, last_year_of(authorities[-1], now)), _leaf(scene))
    known = {item.certificate.fingerprint for item in state.authorities}
    _patch(scene, f"secret/{_CERTIFICATES}", state.data())
    wait_until("the operator's new authority", lambda: bool(_trusted(scene) - known), timeout_s=_KEPT_S, every_s=1)


def last_year_of(authority: Authority, now: float) -> Authority:
    """Returns the authority as it would be if it had been made earlier: what it has signed can be checked with it."""
    assert authority.key is not None
    key = load_pem_private_key(authority.key.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    old = x509.load_pem_x509_certificate(authority.certificate.pem.encode())
    ends_at = datetime.datetime.fromtimestamp(now + AUTHORITY_LEFT_S - _WEEK_S, datetime.UTC)
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, key.public_key(), x509.random_serial_number(), old.not_valid_before_utc, ends_at
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    return Authority(read_certificates(pem)[0], authority.key)


@_kind("certificates-lost", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _certificates_lost(scene: Scene) -> Iterator[None]:
    """The operator's Secret is deleted, and applied again without data: the operator puts back what was in it."""
    lost, trusted = _certificates(scene), _trusted(scene)
    secret = _object(scene, "secret", _CERTIFICATES)
    kept = {name: secret["metadata"].get(name) for name in ("name", "namespace", "labels", "annotations")}
    fresh = {"apiVersion": "v1", "kind": "Secret", "metadata": kept, "type": secret["type"]}
    refusals: list[str] = []

    def is_back() -> bool:
        done = scene.cluster.kubectl("create", "-f", "-", stdin=json.dumps(fresh), check=False)
        refusals[:] = [done.stderr]
        return done.returncode == 0 or "AlreadyExists" in done.stderr

    try:
        scene.cluster.kubectl("delete", f"secret/{_CERTIFICATES}", f"--namespace={OPERATOR_NAMESPACE}")
    finally:  # the operator does not make a Secret that is not there
        wait_until(
            f"the Secret {_CERTIFICATES} to be created again",
            is_back,
            timeout_s=_PODS_GONE_S,
            every_s=1,
            hint=lambda: " ".join(refusals),
        )
    wait_until(
        "the operator to put back its certificate",
        lambda: _certificates(scene) == lost,
        timeout_s=_KEPT_S,
        every_s=1,
    )
    assert _trusted(scene) == trusted
    yield


@_kind(
    "certificate-changed",
    announced=False,
    then=Then.GOES_ON,
    workloads=BOTH,
    own_cluster=True,
    alerts=("GracepointCertificateExpires",),
)
def _certificate_changed(scene: Scene) -> Iterator[None]:
    """The operator's certificate comes to its last week, is renewed, and all replicas serve the new one."""
    state = OwnCertificates.of(_certificates(scene))
    signers = issuers(_leaf(scene).chain, (item.certificate for item in state.authorities))
    authority = next(item for item in state.authorities if item.certificate in signers)
    assert authority.key is not None
    names = [f"gracepoint.{OPERATOR_NAMESPACE}.svc{domain}" for domain in ("", ".cluster.local")]
    leaf = issue(Pair(authority.certificate.pem, authority.key), names, time.time(), _WEEK_S)
    _patch(scene, f"secret/{_CERTIFICATES}", OwnCertificates(state.authorities, leaf).data())
    wanted: list[float] = []
    shown: list[float | None] = []

    def renewed() -> bool:
        now = OwnCertificates.of(_certificates(scene)).leaf
        wanted[:] = [now.certificate.ends_at] if now is not None else []
        return bool(wanted) and wanted[0] > time.time() + 2 * _WEEK_S

    def served() -> bool:
        shown[:] = [replica.get(_EXPIRY) for replica in operator.by_replica(scene.cluster)]
        return bool(shown) and all(ends_at is not None and abs(ends_at - wanted[0]) < 1 for ends_at in shown)

    wait_until("the operator to renew its certificate", renewed, timeout_s=_KEPT_S, every_s=1)
    wait_until(
        "all replicas of the operator to serve the renewed certificate",
        served,
        timeout_s=_KEPT_S,
        every_s=1,
        hint=lambda: f"\nit ends at {wanted}, what they serve at {shown} (seconds since the epoch)",
    )
    yield


def _patch(scene: Scene, name: str, data: Mapping[str, str]) -> None:
    scene.cluster.kubectl(
        *("patch", name, f"--namespace={OPERATOR_NAMESPACE}"),
        *("--type=merge", "--patch", json.dumps({"data": data})),
    )


def _certificates(scene: Scene) -> Json:
    found: Json = _object(scene, "secret", _CERTIFICATES).get("data", {})
    return found


def _leaf(scene: Scene) -> Pair:
    leaf = OwnCertificates.of(_certificates(scene)).leaf
    assert leaf is not None
    return leaf


def _trusted(scene: Scene) -> set[str]:
    """The authorities of which pods and API server are told."""
    return {
        item.certificate.fingerprint for item in Bundle.of(_object(scene, "configmap", _TRUST).get("data", {})).items
    }


def _object(scene: Scene, kind: str, name: str) -> Json:
    found = scene.cluster.kubectl("get", f"{kind}/{name}", f"--namespace={OPERATOR_NAMESPACE}", "--output=json").stdout
    parsed: Json = json.loads(found)
    return parsed


@_kind("operator-replica-killed", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _operator_replica_killed(scene: Scene) -> Iterator[None]:
    """One replica of the operator is killed."""
    name = min(_operator_pods(scene))
    scene.cluster.kubectl(
        *("delete", "pod", name, f"--namespace={OPERATOR_NAMESPACE}", "--force", "--grace-period=0", "--wait=false")
    )
    yield


@_kind("operator-killed", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _operator_killed(scene: Scene) -> Iterator[None]:
    """Both replicas of the operator are killed."""
    operator.restart_abruptly(scene.cluster)
    yield


@_kind("operator-unreachable", announced=False, then=Then.GOES_ON, own_cluster=True)
def _operator_unreachable(scene: Scene) -> Iterator[None]:
    """The network between the processes and the operator is cut for ten seconds."""
    with _cut_off_operator(scene):
        time.sleep(AWAY_S)
    yield


@contextlib.contextmanager
def _cut_off_operator(scene: Scene) -> Iterator[None]:
    cluster, addresses = machine.local(scene.cluster), _operator_pods(scene).values()
    own = _addresses(scene.cluster, scene.run.namespace, f"{scene.run.form.name_label}={scene.run.name}").values()
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes:
            stack.enter_context(cluster.parted(node, [(a, b) for a in own for b in addresses]))
        yield


@_kind("processes-parted", announced=False, then=Then.GOES_ON, own_cluster=True)
def _processes_parted(scene: Scene) -> Iterator[None]:
    """The network between two processes is cut for some seconds."""
    own = _addresses(scene.cluster, scene.run.namespace, f"{scene.run.form.name_label}={scene.run.name}")
    first, second = (own[pod.name] for pod in scene.pods)
    with machine.local(scene.cluster).parted(scene.pod.node, [(first, second)]):
        time.sleep(_PARTED_S)
    yield


@_kind("dns-away", announced=False, then=Then.GOES_ON, own_cluster=True)
def _dns_away(scene: Scene) -> Iterator[None]:
    """The cluster's DNS servers are killed."""
    selected = ("--selector=k8s-app=kube-dns", "--namespace=kube-system")
    scene.cluster.kubectl("delete", "pod", *selected, "--force", "--grace-period=0")
    yield
    wait_for_rollout(scene.cluster, "deployment/coredns", namespace="kube-system", timeout_s=120)


@_kind("storage-read-only", announced=False, then=Then.GOES_ON, workloads=BOTH, alerts=_SAVES_FAIL)
def _storage_read_only(scene: Scene) -> Iterator[None]:
    """The job's directory refuses every write for ten seconds, in which saves are due."""
    scene.run.checkpoints.chmod(0o555)
    try:
        time.sleep(AWAY_S)
    finally:
        scene.run.checkpoints.chmod(0o777)
    yield


@_kind("storage-full", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True, alerts=_SAVES_FAIL)
def _storage_full(scene: Scene) -> Iterator[None]:
    """The volume of the checkpoints has no room for ten seconds, in which saves are due."""
    with volume.filled(scene.run.checkpoints.parent):
        time.sleep(AWAY_S)
    yield


@_kind("storage-slow", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _storage_slow(scene: Scene) -> Iterator[None]:
    """The volume of the checkpoints takes writes in a tenth of the time alone, for twenty seconds."""
    volume.slow(scene.run.checkpoints.parent, _SLOW_S)
    yield


@_kind(
    "storage-503", announced=False, then=Then.GOES_ON, workloads=(trace.BUCKET,), own_cluster=True, alerts=_SAVES_FAIL
)
def _storage_503(scene: Scene) -> Iterator[None]:
    """The store answers 503 to every request until a save is refused, ten seconds at least; later ones succeed."""
    yield from _refusing_store(scene, Fault(How.ANSWER, 503))


@_kind(
    "storage-cut-off",
    announced=False,
    then=Then.GOES_ON,
    workloads=(trace.BUCKET,),
    own_cluster=True,
    alerts=_SAVES_FAIL,
)
def _storage_cut_off(scene: Scene) -> Iterator[None]:
    """Every connection to the store is reset until a save is refused, ten seconds at least; later ones succeed."""
    yield from _refusing_store(scene, Fault(How.REFUSE))


def _refusing_store(scene: Scene, fault: Fault) -> Iterator[None]:
    store, folder = scene.store, scene.run.checkpoints
    assert store is not None, "expected a store of its checkpoints"

    def saves_refused() -> list[str]:
        refused = [each.asked for each in store.exchanges if each.asked.number > before and each.fault is fault.how]
        of_a_step = re.compile(rf"/{re.escape(folder.name)}/\d")  # not that of the lease
        return [asked.target for asked in refused if asked.method == "PUT" and of_a_step.search(asked.target)]

    with store.rules(Rule(fault)):
        before = store.number
        time.sleep(AWAY_S)
        # A save that just reads or lists repeats that for a minute; then the next one is due.
        wait_until("the store to refuse a PUT of a step", lambda: bool(saves_refused()), timeout_s=9 * AWAY_S)
        complete = checks.complete_steps(folder)
    yield
    wait_until(
        f"{scene.run.name} to save again after the store refused {len(saves_refused())} PUTs of steps",
        lambda: max(checks.complete_steps(folder), default=0) > max(complete, default=0),
        timeout_s=_SAVED_S,
        every_s=1,
        hint=lambda: f"\ncomplete before: {complete}, now: {checks.complete_steps(folder)}",
    )


@_kind("worker-killed", announced=False, then=Then.GOES_ON, own_cluster=True, alerts=_SAVES_FAIL)
def _worker_killed(scene: Scene) -> Iterator[None]:
    """The worker that writes the saves of a process is killed."""
    _kill_beside(scene, "gracepoint.async_calls")
    yield


@_kind(
    "keeper-killed",
    announced=False,
    then=Then.GOES_ON,
    workloads=(trace.KEPT,),
    own_cluster=True,
    alerts=_SAVES_FAIL,
)
def _keeper_killed(scene: Scene) -> Iterator[None]:
    """The keeper of a process is killed with its worker; the kubelet starts another one, and saves go on."""
    _kill_beside(scene, "gracepoint.async_calls.keeper")
    _wait_for_save(scene.run)
    yield


def _kill_beside(scene: Scene, module: str) -> None:
    """Kills the processes of a pod, beside its trainer, that run a module of the library."""
    found = [
        process
        for process in machine.processes_of(scene.run, f"{module} ")
        if process.environ().get("GRACEPOINT_POD_NAME") == scene.pod.name
    ]
    if not found:
        raise AssertionError(f"expected a process of {module} in {scene.pod.name}, found none")
    for process in found:
        process.kill()


@_kind("snapshot-server-killed", announced=False, then=Then.GOES_ON)
def _snapshot_server_killed(scene: Scene) -> Iterator[None]:
    """The node's snapshot server is killed."""
    scene.cluster.kubectl(
        *("delete", "pod", f"--namespace={OPERATOR_NAMESPACE}", "--force", "--grace-period=0", "--wait=false"),
        f"--selector=gracepoint.dev/snapshot-server={SNAPSHOT_SERVERS}",
        f"--field-selector=spec.nodeName={scene.pod.node}",
    )
    yield


def prepare(cluster: Cluster, *names: str) -> None:
    """Gives nodes the label of those on which trainers and snapshot servers may be."""
    cluster.kubectl("label", "node", *names, "--overwrite", "=".join(LABEL))


def _operator_pods(scene: Scene) -> dict[str, str]:
    return _addresses(scene.cluster, OPERATOR_NAMESPACE, _OPERATOR)


def _addresses(cluster: Cluster, namespace: str, selector: str, *, node: str | None = None) -> dict[str, str]:
    """The addresses of the pods that run, by their names; on one node if it is named."""
    query = ["get", "pods", f"--namespace={namespace}", f"--selector={selector}", "--output=json"]
    query += [f"--field-selector=spec.nodeName={node}"] if node is not None else []
    items: list[Json] = json.loads(cluster.kubectl(*query).stdout)["items"]
    return {
        item["metadata"]["name"]: item["status"]["podIP"]
        for item in items
        if item["status"].get("phase") == "Running" and "podIP" in item["status"]
    }


def _saved_once_more(run: TrainingRun) -> Callable[[], None]:
    """Returns what waits until the processes have said once more than now that their save is over."""

    def number() -> int:
        words = account.read_words(run.output)
        return sum(word.message.startswith("preempted saved=") for said in words.values() for word in said)

    before = number()

    def wait() -> None:
        wait_until(f"{run.name} to have saved", lambda: number() > before, timeout_s=_PODS_GONE_S)

    return wait
