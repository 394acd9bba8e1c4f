"""The kinds of failures: how each begins, how it ends, whether it counts, and what has to be named.

A failure of the infrastructure takes place at a restart, which a save before it has caused: that is when a gang finds
the cluster as it is by then.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from gracepoint.wire import names
from tests.restart_budget.control_plane import Json, Refused, Start, is_waiting, now
from tests.restart_budget.gang import Gang

_TAINT = "example.com/repair"
_URGENT = "urgent"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of failure.

    Attributes:
        name: What it is called in the table.
        begin: Lets it happen to a gang that runs.
        counted: Whether a restart because of it counts.
        words: What the operator must say of it within half a minute, in one text. Of a program's error: nothing.
        end: Takes its cause away.
    """

    name: str
    begin: Callable[[Gang], None]
    counted: bool = False
    words: tuple[str, ...] = ()
    end: Callable[[Gang], None] = lambda gang: None


def refused(reason: str, message: str) -> Callable[[Gang], None]:
    """The kubelet of the second node admits no pod: no container is ever run."""

    def start(pod: Json) -> Json:
        return {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {message}"}

    return _at_start(start)


def _at_start(start: Start) -> Callable[[Gang], None]:
    def begin(gang: Gang) -> None:
        met = threading.Event()

        def started(pod: Json) -> Json | None:
            met.set()
            return start(pod)

        gang.plane.kubelets.starts[gang.nodes[1]] = started
        _restarts(gang)
        gang.until(met.is_set, "the kubelet to see the pod")

    return begin


def _restarts(gang: Gang) -> None:
    """The gang saves, leaves, and is made anew."""
    restarts = gang.account().restarts
    gang.leave()
    gang.until(lambda: gang.account().restarts > restarts, "the JobSet to restart")


def _starts_again(gang: Gang) -> None:
    gang.plane.kubelets.starts.pop(gang.nodes[1], None)


def _image_is_missing(gang: Gang) -> None:
    def start(pod: Json) -> Json:
        message = 'Back-off pulling image "train": ErrImagePull: not found'
        gang.event(pod, "Failed", 'Failed to pull image "train": not found')
        return is_waiting(pod, "ImagePullBackOff", message)

    _at_start(start)(gang)


def _volume_is_missing(gang: Gang) -> None:
    def start(pod: Json) -> Json:
        gang.event(
            pod, "FailedMount", 'MountVolume.SetUp failed for volume "checkpoints": mount failed: exit status 32'
        )
        return is_waiting(pod, "ContainerCreating")

    _at_start(start)(gang)


def _node_is_missing(gang: Gang) -> None:
    gang.api.delete(f"/api/v1/nodes/{gang.nodes[1]}")
    _restarts(gang)


def _node_comes(gang: Gang) -> None:
    gang.add_node(gang.nodes[1])


def _node_dies(gang: Gang) -> None:
    """Its kubelet is silent, so the pod that is deleted there never goes.

    The other process has lost its peer, and leaves minutes before anything marks the pod: it is made anew, and waits.
    """
    gang.plane.kubelets.dead.add(gang.nodes[1])
    (left,) = (pod for pod in gang.running() if pod["spec"]["nodeName"] == gang.nodes[0])
    gang.exit(names.DEFAULT_NOT_JOINED_EXIT_CODE, of=left)
    gang.until(lambda: _is_made_anew(gang, left["metadata"]["uid"]), "another pod in the place of the one that left")
    path = f"/api/v1/nodes/{gang.nodes[1]}"
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": now()}
    gang.api.set_status(path, {"conditions": [unknown]})
    gang.api.merge(path, {"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}})
    gang.until(lambda: len(gang.running()) == 1, "the taint manager to delete the pod")


def _is_made_anew(gang: Gang, uid: str) -> bool:
    running = gang.running()
    return len(running) == 2 and uid not in [pod["metadata"]["uid"] for pod in running]


def _node_lives(gang: Gang) -> None:
    path = f"/api/v1/nodes/{gang.nodes[1]}"
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now()}
    gang.api.set_status(path, {"conditions": [ready]})
    gang.api.merge(path, {"spec": {"taints": None}})
    gang.plane.kubelets.dead.discard(gang.nodes[1])


def _quota_is_used_up(gang: Gang) -> None:
    path = f"/api/v1/namespaces/{gang.name}/resourcequotas"
    gang.api.create(path, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    gang.until(lambda: "hard" in gang.api.get(f"{path}/none").get("status", {}), "the quota to be counted")
    _restarts(gang)


def _quota_is_raised(gang: Gang) -> None:
    gang.api.delete(f"/api/v1/namespaces/{gang.name}/resourcequotas/none")


def _foreign_webhook_is_away(gang: Gang) -> None:
    webhook = {
        "name": "pods.foreign.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gang.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    gang.api.create(f"{_WEBHOOKS}", {"metadata": {"name": f"foreign-{gang.name}"}, "webhooks": [webhook]})
    gang.until(lambda: not _accepts_pods(gang), "the API server to call the webhook")
    _restarts(gang)


_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def _accepts_pods(gang: Gang) -> bool:
    spec = {"containers": [{"name": "c", "image": "c"}]}
    try:
        gang.api.create(
            f"/api/v1/namespaces/{gang.name}/pods?dryRun=All", {"metadata": {"name": "trial"}, "spec": spec}
        )
    except Refused:
        return False
    return True


def _foreign_webhook_goes(gang: Gang) -> None:
    gang.api.delete(f"{_WEBHOOKS}/foreign-{gang.name}")


def _evicted(gang: Gang) -> None:
    meta = gang.running()[0]["metadata"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {name: meta[name] for name in ("name", "namespace")},
    }
    gang.api.create(f"/api/v1/namespaces/{gang.name}/pods/{meta['name']}/eviction", body)


def _tainted(gang: Gang) -> None:
    taint = {"key": _TAINT, "effect": "NoExecute"}
    gang.api.merge(f"/api/v1/nodes/{gang.nodes[0]}", {"spec": {"taints": [taint]}})


def _untainted(gang: Gang) -> None:
    gang.api.merge(f"/api/v1/nodes/{gang.nodes[0]}", {"spec": {"taints": None}})


def _preempted_by_scheduler(gang: Gang) -> None:
    (size,) = {pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in gang.running()}
    container = {"name": _URGENT, "image": _URGENT, "resources": {"requests": {"cpu": size}}}
    spec = {
        "containers": [container],
        "nodeSelector": {"kubernetes.io/hostname": gang.nodes[0]},
        "priorityClassName": "system-cluster-critical",
    }
    gang.api.create(f"/api/v1/namespaces/{gang.name}/pods", {"metadata": {"name": _URGENT}, "spec": spec})


def _urgent_goes(gang: Gang) -> None:
    gang.api.delete(f"/api/v1/namespaces/{gang.name}/pods/{_URGENT}", grace_s=0)


def _exits(code: int, why: str = "Error") -> Callable[[Gang], None]:
    def begin(gang: Gang) -> None:
        gang.exit(code, why)

    return begin


def _does_not_join(gang: Gang) -> None:
    """A process does not get into the job at a restart: its Job makes the pod anew, and the other one waits."""
    restarts = gang.account().restarts
    gang.leave()
    gang.wait_to_run(restarts + 1)
    gang.exit(names.DEFAULT_NOT_JOINED_EXIT_CODE)


def _disrupted(mark: str, about: str, **status: str) -> Callable[[Gang], None]:
    def begin(gang: Gang) -> None:
        gang.disrupt(mark, about, **status)

    return begin


_SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
_PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi."

#: Failures of the infrastructure.
INFRASTRUCTURE = (
    Kind("saved, and left", _exits(names.DEFAULT_SAVED_EXIT_CODE), words=("ProcessLeft", "exit code 77", "has saved")),
    Kind("left without a save", _exits(names.DEFAULT_UNSAVED_EXIT_CODE), words=("ProcessLeft", "exit code 78")),
    Kind("does not get into the job", _does_not_join, words=("ProcessLeft", "exit code 79", "did not get into")),
    Kind("eviction by the API", _evicted, words=("eviction of the pod",)),
    Kind("taint manager", _tainted, words=(_TAINT,), end=_untainted),
    Kind("scheduler preempts", _preempted_by_scheduler, words=("PreemptionByScheduler",), end=_urgent_goes),
    Kind(
        "pod garbage collector",
        _disrupted("DeletionByPodGC", "PodGC: node no longer exists"),
        words=("DeletionByPodGC",),
    ),
    Kind(
        "node shuts down",
        _disrupted("TerminationByKubelet", _SHUTDOWN, reason="Terminated", message=_SHUTDOWN),
        words=("TerminationByKubelet",),
    ),
    Kind(
        "kubelet evicts",
        _disrupted("TerminationByKubelet", _PRESSURE, reason="Evicted", message=_PRESSURE),
        words=("TerminationByKubelet",),
    ),
    Kind("image cannot be pulled", _image_is_missing, words=("waits for", "ImagePullBackOff"), end=_starts_again),
    Kind("volume cannot be mounted", _volume_is_missing, words=("waits for", "mount"), end=_starts_again),
    Kind("quota is used up", _quota_is_used_up, words=("waits for", "quota"), end=_quota_is_raised),
    Kind(
        "webhook of another project",
        _foreign_webhook_is_away,
        words=("waits for", "webhook"),
        end=_foreign_webhook_goes,
    ),
    Kind("node is missing", _node_is_missing, words=("waits for", "node"), end=_node_comes),
    Kind("pod stays on a dead node", _node_dies, words=("the end of the pod", "{node}"), end=_node_lives),
    Kind(
        "kubelet: UnexpectedAdmissionError",
        refused(
            "UnexpectedAdmissionError",
            "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu",
        ),
        words=("UnexpectedAdmissionError",),
        end=_starts_again,
    ),
    Kind(
        "kubelet: OutOfcpu",
        refused("OutOfcpu", "Node didn't have enough resource: cpu, requested: 600, used: 600, capacity: 1000"),
        words=("OutOfcpu",),
        end=_starts_again,
    ),
    Kind(
        "kubelet: NodeAffinity",
        refused("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"),
        words=("NodeAffinity",),
        end=_starts_again,
    ),
    Kind(
        "kubelet: TopologyAffinityError",
        refused("TopologyAffinityError", "Resources cannot be allocated with Topology locality"),
        words=("TopologyAffinityError",),
        end=_starts_again,
    ),
)

#: Errors of the program.
PROGRAM = (
    Kind("exception", _exits(1), counted=True),
    Kind("wrong arguments", _exits(2), counted=True),
    Kind("killed for memory", _exits(137, "OOMKilled"), counted=True),
    Kind("segmentation fault", _exits(139), counted=True),
    Kind("abort", _exits(134), counted=True),
    Kind("an exit code of its own", _exits(42), counted=True),
    Kind("hang, with the action Restart", _exits(names.STALLED_EXIT_CODE), counted=True),
)
