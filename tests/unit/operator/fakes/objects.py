"""Objects as the API server, the Job controller and JobSet v0.10 write them, cut to what matters."""

from __future__ import annotations

import datetime
from typing import Any

from gracepoint.wire import names

Body = dict[str, Any]

#: The clock of all tests begins here.
NOW = datetime.datetime(2026, 3, 1, 12, 0, 0, tzinfo=datetime.UTC).timestamp()
NAMESPACE = "team-a"
JOBSET_UID = "0b6f1c9e-51f4-4f0c-9a57-3c1de3f6a001"
LONE_JOB_UID = "5d2c8b1e-9f0b-4c57-8d4e-2a7f1b9c0002"
GKE_TAINT = "cloud.google.com/impending-node-termination"


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, at: float = NOW) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at

    def move(self, seconds: float) -> None:
        self.at += seconds


def stamp(at: float) -> str:
    """RFC 3339 in whole seconds, as metav1.Time."""
    return datetime.datetime.fromtimestamp(int(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node(
    name: str = "node-1",
    *,
    taints: list[Body] | None = None,
    written_at: float | None = None,
    labels: Body | None = None,
    annotations: Body | None = None,
    conditions: list[Body] | None = None,
    unschedulable: bool = False,
    deleted_at: float | None = None,
) -> Body:
    """``deleted_at``: when it was deleted, while a finalizer holds it."""
    managed = []
    if written_at is not None:
        managed = [
            {
                "manager": "kubectl-taint",
                "operation": "Update",
                "apiVersion": "v1",
                "time": stamp(written_at),
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:spec": {"f:taints": {}}},
            }
        ]
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
            "annotations": annotations or {},
            "managedFields": managed,
            **_deleted(deleted_at),
        },
        "spec": {"taints": taints or []} | ({"unschedulable": True} if unschedulable else {}),
        "status": {"conditions": conditions or [condition("Ready", reason="KubeletReady")]},
    }


def snapshot_server(
    node: str = "node-1",
    *,
    number: int = 0,
    host: str = "127.0.0.1",
    ready: bool = True,
    deleted_at: float | None = None,
    installation: str = "gp-snapshots",
    namespace: str = "default",
) -> Body:
    """The pod of a snapshot server. ``number``: how often its DaemonSet has made it on this node."""
    return {
        "metadata": {
            "name": f"gp-snapshots-{node}-{number}",
            "namespace": namespace,
            "uid": f"uid-server-{node}-{number}",
            "labels": {names.LABEL_SNAPSHOT_SERVER: installation},
            **_deleted(deleted_at),
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "podIP": host,
            "conditions": [condition("Ready", "True" if ready else "False")],
        },
    }


def condition(type: str, status: str = "True", *, reason: str = "", message: str = "", at: float = NOW) -> Body:
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(at)}


def shutdown(at: float = NOW) -> Body:
    """The condition that a kubelet writes when its node shuts down."""
    return condition("Ready", "False", reason="KubeletNotReady", message="node is shutting down", at=at)


def _deleted(at: float | None) -> Body:
    """What the API server writes into an object without a grace period of its own."""
    return {} if at is None else {"deletionTimestamp": stamp(at), "deletionGracePeriodSeconds": 0}


def node_claim(
    node: str = "node-1",
    *,
    annotations: Body | None = None,
    expire_after: str = "720h",
    created_at: float = NOW - 100,
    conditions: list[Body] | None = None,
    deleted_at: float | None = None,
    labels: Body | None = None,
) -> Body:
    """As Karpenter v1 writes it. ``deleted_at``: when it was deleted, while Karpenter's finalizer holds it."""
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodeClaim",
        "metadata": {
            "name": f"pool-{node}",
            "uid": f"uid-claim-{node}",
            "creationTimestamp": stamp(created_at),
            "annotations": annotations or {},
            "labels": labels or {},
            **_deleted(deleted_at),
        },
        "spec": {"expireAfter": expire_after, "terminationGracePeriod": "1h"},
        "status": {"nodeName": node, "conditions": [condition("Ready", reason="Ready"), *(conditions or [])]},
    }


def workload(
    *,
    conditions: list[Body] | None = None,
    limit_s: int | None = None,
    used_s: int | None = None,
    version: str = "v1beta2",
) -> Body:
    """As Kueue writes it for a JobSet; v1beta1 misspells a name."""
    made: Body = {
        "apiVersion": f"kueue.x-k8s.io/{version}",
        "kind": "Workload",
        "metadata": {
            "name": "jobset-train-1a2b3",
            "namespace": NAMESPACE,
            "uid": "uid-workload",
            "ownerReferences": [
                {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "train", "uid": JOBSET_UID}
            ],
        },
        "spec": {"active": True, "queueName": "team-a"},
        "status": {"conditions": conditions or []},
    }
    if limit_s is not None:
        made["spec"]["maximumExecutionTimeSeconds"] = limit_s
    if used_s is not None:
        used = "Exexcution" if version == "v1beta1" else "Execution"
        made["status"][f"accumulatedPast{used}TimeSeconds"] = used_s
    return made


def taint(key: str = GKE_TAINT, effect: str = "NoSchedule", *, added_at: float | None = None) -> Body:
    made: Body = {"key": key, "effect": effect}
    if added_at is not None:
        made["timeAdded"] = stamp(added_at)
    return made


def resource_claim(
    index: int = 0, *, device: str = "tpu-0", tolerations: list[Body] | None = None, namespace: str = NAMESPACE
) -> Body:
    """As the scheduler has allocated it for ``pod(index)``."""
    result: Body = {"request": "tpu", "driver": "tpu.example.com", "pool": f"node-{index + 1}", "device": device}
    return {
        "metadata": {"name": f"train-{index}-tpu", "namespace": namespace, "uid": f"uid-claim-{index}-{device}"},
        "spec": {"devices": {"requests": [{"name": "tpu"}]}},
        "status": {
            "allocation": {"devices": {"results": [result | ({"tolerations": tolerations} if tolerations else {})]}},
            "reservedFor": [{"resource": "pods", "name": pod(index)["metadata"]["name"], "uid": f"uid-pod-{index}-0"}],
        },
    }


def resource_slice(
    node: str = "node-1", *, generation: int = 1, slices: int = 1, name: str = "", **taints: list[Body]
) -> Body:
    """As a driver writes it, one of so many. ``taints``: those of each device, by its name with _ in place of -."""
    named = {device.replace("_", "-"): found for device, found in taints.items()}
    devices = [
        {"name": device} | ({"taints": named[device]} if device in named else {}) for device in ("tpu-0", "tpu-1")
    ]
    name = name or f"{node}-tpus"
    pool = {"name": node, "generation": generation, "resourceSliceCount": slices}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"driver": "tpu.example.com", "nodeName": node, "pool": pool, "devices": devices},
    }


def device_taint_rule(selector: Body | None, found: Body) -> Body:
    """As an administrator writes it."""
    spec = {"taint": found} | ({} if selector is None else {"deviceSelector": selector})
    return {"metadata": {"name": "repair", "uid": "uid-repair"}, "spec": spec}


def namespace(name: str = NAMESPACE, *, deleted: bool = False, **labels: str) -> Body:
    labels = {"kubernetes.io/metadata.name": name, **labels}
    made: Body = {"metadata": {"name": name, "uid": f"uid-namespace-{name}", "labels": labels}}
    if deleted:
        made["metadata"]["deletionTimestamp"] = stamp(NOW)
    return made


def jobset(
    *,
    restarts: int = 0,
    finished: str = "",
    deleted: bool = False,
    suspended: bool = False,
    injected: bool = True,
    uid: str = JOBSET_UID,
) -> Body:
    pod_labels = {names.LABEL_POLICY: "careful"} if injected else {}
    made: Body = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "train",
            "namespace": NAMESPACE,
            "uid": uid,
            "labels": {names.LABEL_POLICY: "careful"},
        },
        "spec": {
            "suspend": suspended,
            "replicatedJobs": [
                {"name": "workers", "template": {"spec": {"template": {"metadata": {"labels": pod_labels}}}}}
            ],
        },
        "status": {"restarts": restarts, "conditions": []},
    }
    if finished:
        made["status"]["terminalState"] = finished
        made["status"]["conditions"] = [{"type": finished, "status": "True"}]
    if deleted:
        made["metadata"]["deletionTimestamp"] = stamp(NOW)
    return made


def lone_job(*, condition: str = "", suspended: bool = False, injected: bool = True) -> Body:
    """A Job by itself, as ``lone_pod`` belongs to it."""
    pod_labels = {names.LABEL_POLICY: "careful"} if injected else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "alone",
            "namespace": NAMESPACE,
            "uid": LONE_JOB_UID,
            "labels": {names.LABEL_POLICY: "careful"},
        },
        "spec": {
            "suspend": suspended,
            "completions": 2,
            "parallelism": 2,
            "completionMode": "Indexed",
            "template": {"metadata": {"labels": pod_labels}},
        },
        "status": {"conditions": [{"type": condition, "status": "True"}] if condition else []},
    }


def lone_pod(index: int = 0, life: int = 0, **fields: Any) -> Body:
    """A pod of ``lone_job``. ``life`` counts how often it was replaced."""
    made = pod(index, **fields)
    made["metadata"] |= {
        "name": f"alone-{index}-{life}xyz",
        "uid": f"uid-alone-{index}-{life}",
        "labels": {
            names.LABEL_POLICY: "careful",
            "batch.kubernetes.io/job-name": "alone",
            "batch.kubernetes.io/controller-uid": LONE_JOB_UID,
            "batch.kubernetes.io/job-completion-index": str(index),
        },
    }
    return made


def job(
    *, condition: str = "", deleted: bool = False, attempt: int = 0, suspended: bool = False, completions: int = 2
) -> Body:
    made: Body = {
        "metadata": {
            "name": "train-workers-0",
            "namespace": NAMESPACE,
            "uid": f"uid-job-{attempt}",
            "labels": {
                names.JOBSET_LABEL_UID: JOBSET_UID,
                names.JOBSET_LABEL_RESTART_ATTEMPT: str(attempt),
            },
        },
        "spec": {"suspend": suspended, "completions": completions},
        "status": {"conditions": [{"type": condition, "status": "True"}] if condition else []},
    }
    if deleted:
        made["metadata"]["deletionTimestamp"] = stamp(NOW)
    return made


def pod(
    index: int = 0,
    *,
    on: str | None = None,
    attempt: int = 0,
    created_at: float = NOW - 100,
    phase: str = "Running",
    deleting_at: float | None = None,
    grace_s: int = 30,
    disruption: str = "",
    tolerations: list[Body] | None = None,
    labelled: bool = True,
) -> Body:
    where = f"node-{index + 1}" if on is None else on
    labels = {
        names.JOBSET_LABEL_UID: JOBSET_UID,
        names.JOBSET_LABEL_NAME: "train",
        names.JOBSET_LABEL_REPLICATED_JOB: "workers",
        names.JOBSET_LABEL_JOB_INDEX: "0",
        names.JOBSET_LABEL_RESTART_ATTEMPT: str(attempt),
        "batch.kubernetes.io/job-name": "train-workers-0",
        "batch.kubernetes.io/controller-uid": f"uid-job-{attempt}",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    if labelled:
        labels[names.LABEL_POLICY] = "careful"
    conditions: list[Body] = []
    if where:
        conditions.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(created_at + 1)})
    if phase == "Running":
        conditions.append(condition("Ready", at=created_at + 2))
    if disruption:
        conditions.append(
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": disruption,
                "message": "told by the test",
                "lastTransitionTime": stamp(NOW),
            }
        )
    made: Body = {
        "metadata": {
            "name": f"train-workers-0-{index}-{attempt}xyz",
            "namespace": NAMESPACE,
            "uid": f"uid-pod-{index}-{attempt}",
            "creationTimestamp": stamp(created_at),
            "labels": labels,
        },
        "spec": {
            "nodeName": where,
            "terminationGracePeriodSeconds": grace_s,
            "tolerations": tolerations
            if tolerations is not None
            else [
                {
                    "key": f"node.kubernetes.io/{key}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 300,
                }
                for key in ("not-ready", "unreachable")
            ],
        },
        "status": {"phase": phase, "conditions": conditions},
    }
    if deleting_at is not None:
        made["metadata"]["deletionTimestamp"] = stamp(deleting_at)
        made["metadata"]["deletionGracePeriodSeconds"] = grace_s
    return made


def policy(**spec: Any) -> Body:
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "CheckpointPolicy",
        "metadata": {
            "name": "careful",
            "namespace": NAMESPACE,
            "uid": "uid-policy",
            "generation": 1,
        },
        "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}, **spec},
    }


def cluster_policy(
    name: str = "for-all", selector: Body | None = None, default: Body | None = None, **limits: Any
) -> Body:
    spec: Body = {"namespaceSelector": selector or {}, "limits": limits}
    if default is not None:
        spec["default"] = {"checkpoint": {"directory": "/checkpoints/{jobset}"}, **default}
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "ClusterCheckpointPolicy",
        "metadata": {"name": name, "uid": f"uid-cluster-policy-{name}", "generation": 1},
        "spec": spec,
    }


def preemption(
    epoch: int = 1,
    *,
    phase: str | None = "Noticed",
    created_at: float = NOW,
    ended_at: float | None = None,
    deadline_at: float = NOW + 15,
    cancelable: bool = False,
    mode: str = "Enforce",
    pods: list[str] | None = None,
    requests: list[str] | None = None,
    exits: bool = True,
    moves: int = 0,
) -> Body:
    status: Body = {"acknowledgements": {"expected": 2, "received": 0}}
    if phase is not None:
        status["phase"] = phase
    if ended_at is not None:
        status["conditions"] = [
            {
                "type": "Ended",
                "status": "True",
                "reason": phase,
                "message": "",
                "lastTransitionTime": stamp(ended_at),
            }
        ]
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "Preemption",
        "metadata": {
            "name": f"train-{JOBSET_UID[:8]}-{epoch}",
            "namespace": NAMESPACE,
            "uid": f"uid-preemption-{epoch}",
            "creationTimestamp": stamp(created_at),
        },
        "spec": {
            "jobSet": {"name": "train", "uid": JOBSET_UID},
            "epoch": epoch,
            "cause": "SpotTermination",
            "signal": f"taint {GKE_TAINT}:NoSchedule",
            "confidence": "sure",
            "cancelable": cancelable,
            "nodes": ["node-1"],
            "pods": ["train-workers-0-0-0xyz"] if pods is None else pods,
            "observedAt": stamp(created_at),
            "deadline": stamp(deadline_at),
            "moves": moves,
            "requests": [{"name": name, "uid": f"uid-{name}"} for name in requests or ()],
            "mode": mode,
            "exits": exits,
            "policy": {"name": "careful", "spec": {}},
        },
        "status": status,
    }


def request(name: str = "leave", *, created_at: float = NOW, jobset: str = "train", **spec: Any) -> Body:
    """What somebody asks for; without a deadline, in five minutes."""
    timed = "deadline" in spec or "deadlineSeconds" in spec
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "PreemptionRequest",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": stamp(created_at),
        },
        "spec": {"jobSet": {"name": jobset}, **({} if timed else {"deadlineSeconds": 300}), **spec},
    }
