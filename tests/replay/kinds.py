"""The kinds of faults: each is done with the means of the one who does it in a real cluster, and undone afterwards.

A kind is a generator: what stands before its ``yield`` is the fault, what stands after it is done when the job trains
again. What a kind promises stands in its decorator. Starts no thread.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import enum
import json
import time
from collections.abc import Callable, Iterator, Mapping

from kubernetes import client, config

from demo import nodes
from demo.install import OPERATOR_NAMESPACE
from demo.snapshot import Json, Pod
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint_operator.trust.bundle import OVERLAP_S, Bundle, OwnCertificates, Pair, issue
from tests.cluster import asking, machine, operator
from tests.metadata.servers import GceServer
from tests.replay import account, trace, trainer, volume
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

#: Steps between two periodic saves. What nobody announces loses these at most, and those of a save that was under way.
EVERY_STEPS = 30
#: The trainers' priority class: of all pods, they go first.
PRIORITY = "training"
#: Of the nodes that are the replay's to disturb: key and value.
LABEL = ("trains", "it")
SNAPSHOT_SERVERS = "gracepoint-snapshots"
_JOBSET_NAMESPACE = "--namespace=jobset-system"
#: Of pods that only take a place.
_SLEEP = ["python", "-c", "import time; time.sleep(3600)"]
_PODS_GONE_S = 300.0
_STARTED_S = 600.0
_DRAIN_S = 300
#: How long something is away.
_DOWN_S = 3.0
_AWAY_S = 10.0
_SLOW_S = 20
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
    """

    run: TrainingRun
    pods: tuple[Pod, ...]
    pod: Pod
    nodes: tuple[str, ...]
    metadata: Mapping[str, GceServer]
    image: str
    old: set[str]
    since_s: float

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
        )
        return does

    return note


# Notices of clouds and autoscalers.


@_kind("gke-spot", "SpotTermination", workloads=BOTH)
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


@_kind("drain", "Drain", workloads=BOTH)
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
    """Asks as kubectl drain does: again and again, until the eviction is done or the pod is gone."""
    meta = {"name": pod.name, "namespace": scene.run.namespace}
    path = f"/api/v1/namespaces/{scene.run.namespace}/pods/{pod.name}/eviction"
    body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})

    def done() -> bool:
        said = scene.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=body, check=False)
        return said.returncode == 0 or "not found" in said.stderr

    wait_until(f"the eviction of {pod.name}", done, timeout_s=_PODS_GONE_S, every_s=1)


@_kind("pod-deleted", "PodDeletion", workloads=BOTH)
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
    yield from _deleted_when(scene, trainer.BEGAN)


@_kind("notice-at-restore", "PodDeletion", records=(1, 2), phases=())
def _notice_at_restore(scene: Scene) -> Iterator[None]:
    """A pod is deleted, and again as soon as the processes have found each other."""
    yield from _deleted_when(scene, "attached process=")


def _deleted_when(scene: Scene, words: str) -> Iterator[None]:
    _delete(scene)
    old = {pod.name for pod in scene.pods}

    def said() -> set[str]:
        found = account.read_words(scene.run.output)
        return {pod for pod, lines in found.items() if any(line.message.startswith(words) for line in lines)} - old

    wait_until(f"{words} of both processes", lambda: len(said()) >= len(old), timeout_s=_STARTED_S, every_s=0.1)
    scene.since_s = time.time()
    started = scene.run.wait_for_pods()
    scene.old |= {pod.name for pod in started}
    _delete(scene, next(pod for pod in started if pod.process == scene.pod.process))
    yield


@_kind("notice-at-save", "ScaleDown")
def _notice_at_save(scene: Scene) -> Iterator[None]:
    """A taint as soon as a periodic save has begun."""
    due = (asking.newest_step(scene.run) // EVERY_STEPS + 1) * EVERY_STEPS
    scene.run.wait_for_step(due)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)


def _tainted_for_long(scene: Scene) -> Iterator[None]:
    """A taint that leaves the pods their whole grace period."""
    nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)
    yield
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


@_kind("operator-killed-before-notice", "ScaleDown", unheard=True, workloads=BOTH, own_cluster=True)
def _operator_killed_before_notice(scene: Scene) -> Iterator[None]:
    """Both replicas of the operator are killed, and a node is tainted."""
    operator.restart_abruptly(scene.cluster)
    yield from _tainted_for_long(scene)


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


@_kind("operator-away", "PodDeletion", records=(0, 1), phases=(), unheard=True, workloads=BOTH, own_cluster=True)
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
        _wait_for_end_of(scene)
    yield


def _wait_for_end_of(scene: Scene) -> None:
    """Waits until the pod's process has ended."""
    wait_until(
        f"the end of {scene.pod.name}",
        lambda: not any(pod.name == scene.pod.name and pod.phase == "Running" for pod in scene.run.look().pods),
        timeout_s=_PODS_GONE_S,
        every_s=0.5,
    )


@_kind("api-server-away-before-notice", "ScaleDown", workloads=BOTH, own_cluster=True)
def _api_server_away_before_notice(scene: Scene) -> Iterator[None]:
    """The API server is killed, comes back after some seconds, and a node is tainted."""
    machine.restart_api_server(scene.cluster, down_s=_DOWN_S)
    yield from _tainted_for_long(scene)


@_kind("api-server-restored-before-notice", "ScaleDown", own_cluster=True)
def _api_server_restored_before_notice(scene: Scene) -> Iterator[None]:
    """The API server goes back to a copy that is ten seconds old, and a node is tainted."""
    _restore_api_server(scene)
    scene.since_s = time.time()
    yield from _tainted_for_long(scene)


def _restore_api_server(scene: Scene) -> None:
    """Goes back, and lets the controllers start anew that have seen later versions, as those who restore etcd must."""
    with machine.local(scene.cluster).forgetting():
        time.sleep(_AWAY_S)
    _kill_jobset_controller(scene)
    _wait_for_jobset_controller(scene)


@_kind("authority-changed-before-notice", "ScaleDown", unheard=True, own_cluster=True)
def _authority_changed_before_notice(scene: Scene) -> Iterator[None]:
    """The operator gets a new authority, both replicas are killed, and a node is tainted."""
    _change_authority(scene)
    operator.restart_abruptly(scene.cluster)
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
    scene.cluster.kubectl("delete", "pod", "--all", _JOBSET_NAMESPACE, "--force", "--grace-period=0")


def _wait_for_jobset_controller(scene: Scene) -> None:
    scene.cluster.kubectl(
        *("rollout", "status", "deployment/jobset-controller-manager", _JOBSET_NAMESPACE, "--timeout=120s"),
        timeout_s=130,
    )


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


def _delete_and_wait(scene: Scene) -> None:
    """Deletes a pod, and waits until all have ended, and a while longer."""
    _delete(scene)
    old = {pod.name for pod in scene.pods}

    def ended() -> bool:
        return not any(pod.name in old and pod.phase == "Running" for pod in scene.run.look().pods)

    wait_until(f"the processes of {scene.run.name} to end", ended, timeout_s=_PODS_GONE_S, every_s=0.5)
    time.sleep(_AWAY_S)


# What nobody announces, and ends processes.


@_kind("node-off", "NodeLost", announced=False, records=(0, 2), phases=(), own_cluster=True)
def _node_off(scene: Scene) -> Iterator[None]:
    """A machine is off, without a goodbye; the cloud deletes its Node."""
    scene.cluster.lose_node(scene.pod.node, delete_object=True)
    yield
    _bring(scene)


# What the fresh machine says of containers that it does not know, a Job cannot tell from an error of the program
# (docs/restarts.md). If process 0 was there, the other one gets a SIGTERM that it cannot tell anybody: it ends when it
# takes process 0 for dead, or with its grace period.
@_kind("node-rebooted", "NodeLost", announced=False, records=(0, 2), phases=(), counted=1, own_cluster=True)
def _node_rebooted(scene: Scene) -> Iterator[None]:
    """A machine is off, without a goodbye, and a fresh one of its name comes at once."""
    scene.cluster.lose_node(scene.pod.node)
    _bring(scene)
    yield


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
    for pod in scene.pods:
        if pod.process in processes:
            machine.trainer_process(scene.run, pod.name).kill()
    yield


@_kind("process-0-killed", announced=False, counted=1, workloads=BOTH, own_cluster=True)
def _process_0_killed(scene: Scene) -> Iterator[None]:
    """Process 0, by which the others find each other, is killed."""
    yield from _killed(scene, 0)


@_kind("process-1-killed", announced=False, counted=1, workloads=BOTH, own_cluster=True)
def _process_1_killed(scene: Scene) -> Iterator[None]:
    """Another process is killed."""
    yield from _killed(scene, 1)


@_kind("all-processes-killed", announced=False, counted=1, own_cluster=True)
def _all_processes_killed(scene: Scene) -> Iterator[None]:
    """All processes are killed at once."""
    yield from _killed(scene, *(pod.process for pod in scene.pods))


@_kind("out-of-memory", announced=False, counted=1, own_cluster=True)
def _out_of_memory(scene: Scene) -> Iterator[None]:
    """A process takes more memory than its container may have, and the kernel kills it."""
    machine.trainer_process(scene.run, scene.pod.name).send_signal(trainer.TAKE_MEMORY)
    yield


# What nobody announces, and training outlives. No clock jumps: a container has the machine's, as a time namespace has
# offsets of the monotonic clocks alone.


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
    machine.restart_api_server(scene.cluster, down_s=_AWAY_S)
    yield


@_kind("api-server-restored", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _api_server_restored(scene: Scene) -> Iterator[None]:
    """The API server goes back to a copy that is ten seconds old."""
    _restore_api_server(scene)
    yield


@_kind("authority-changed", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _authority_changed(scene: Scene) -> Iterator[None]:
    """The operator's Secret is deleted, and applied again without data: it makes a new authority."""
    _change_authority(scene)
    yield


def _change_authority(scene: Scene) -> None:
    """Deletes the Secret, applies it as the chart does, and waits until pods are told of the new authority."""
    known = _trusted(scene)
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
    wait_until("the operator's new authority", lambda: bool(_trusted(scene) - known), timeout_s=_KEPT_S, every_s=1)


@_kind("certificate-changed", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _certificate_changed(scene: Scene) -> Iterator[None]:
    """The operator's certificate comes to its last week, is renewed, and all replicas serve the new one."""
    data = {name: base64.b64decode(value).decode() for name, value in _certificates(scene).items()}
    authority = OwnCertificates.of(_certificates(scene)).authorities[-1]
    assert authority.key is not None
    # It may be new, after the kind authority-changed; a certificate of it would be held back for a day.
    known = Bundle.of(_object(scene, "configmap", _TRUST).get("data", {}))
    _patch(scene, f"configmap/{_TRUST}", known_for_long(known, time.time()).data())
    names = [f"gracepoint.{OPERATOR_NAMESPACE}.svc{domain}" for domain in ("", ".cluster.local")]
    leaf = issue(Pair(authority.certificate.pem, authority.key), names, time.time(), _WEEK_S)
    data |= {"tls.crt": leaf.chain, "tls.key": leaf.key}
    _patch(
        scene,
        f"secret/{_CERTIFICATES}",
        {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
    )
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


def known_for_long(bundle: Bundle, now: float) -> Bundle:
    """Returns the bundle as if each authority had been known for so long that what it signs is served at once."""
    long_ago = now - 2 * OVERLAP_S
    return Bundle(tuple(dataclasses.replace(item, since=min(item.since, long_ago)) for item in bundle.items))


def _patch(scene: Scene, name: str, data: Mapping[str, str]) -> None:
    scene.cluster.kubectl(
        *("patch", name, f"--namespace={OPERATOR_NAMESPACE}"),
        *("--type=merge", "--patch", json.dumps({"data": data})),
    )


def _certificates(scene: Scene) -> Json:
    found: Json = _object(scene, "secret", _CERTIFICATES).get("data", {})
    return found


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
        time.sleep(_AWAY_S)
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
    scene.cluster.kubectl(
        *("rollout", "status", "deployment/coredns", "--namespace=kube-system", "--timeout=120s"), timeout_s=130
    )


@_kind("storage-read-only", announced=False, then=Then.GOES_ON, workloads=BOTH)
def _storage_read_only(scene: Scene) -> Iterator[None]:
    """The job's directory refuses every write for ten seconds, in which saves are due."""
    scene.run.checkpoints.chmod(0o555)
    try:
        time.sleep(_AWAY_S)
    finally:
        scene.run.checkpoints.chmod(0o777)
    yield


@_kind("storage-full", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _storage_full(scene: Scene) -> Iterator[None]:
    """The volume of the checkpoints has no room for ten seconds, in which saves are due."""
    with volume.filled(scene.run.checkpoints.parent):
        time.sleep(_AWAY_S)
    yield


@_kind("storage-slow", announced=False, then=Then.GOES_ON, workloads=BOTH, own_cluster=True)
def _storage_slow(scene: Scene) -> Iterator[None]:
    """The volume of the checkpoints takes writes in a tenth of the time alone, for twenty seconds."""
    volume.slow(scene.run.checkpoints.parent, _SLOW_S)
    yield


@_kind("worker-killed", announced=False, then=Then.GOES_ON, own_cluster=True)
def _worker_killed(scene: Scene) -> Iterator[None]:
    """The worker that writes the saves of a process is killed."""
    workers = [
        process
        for process in machine.processes_of(scene.run, "gracepoint.async_calls ")
        if process.environ().get("GRACEPOINT_POD_NAME") == scene.pod.name
    ]
    if not workers:
        raise AssertionError(f"expected a worker of {scene.pod.name}, found none")
    for worker in workers:
        worker.kill()
    yield


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
    return _addresses(scene.cluster, OPERATOR_NAMESPACE, "app.kubernetes.io/name=gracepoint")


def _addresses(cluster: Cluster, namespace: str, selector: str) -> dict[str, str]:
    """The addresses of the pods that run, by their names."""
    query = ("get", "pods", f"--namespace={namespace}", f"--selector={selector}", "--output=json")
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
