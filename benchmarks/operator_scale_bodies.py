"""Pods, Jobs, JobSets and nodes as the API server stores them, with ``@NAMES@`` to be replaced. Pure."""

from __future__ import annotations

import json
from typing import Any

from gracepoint.wire import names

Json = dict[str, Any]

POLICY = "policy"
ACCOUNT = "trainer"
GRACE_S = 120
PODS_A_JOB = 32
#: Name of the snapshot servers' DaemonSet and Secret.
SERVERS = "gracepoint-snapshots"
_GPUS = 8


def _gang_labels() -> Json:
    return {
        names.LABEL_POLICY: POLICY,
        names.JOBSET_LABEL_NAME: "@GANG@",
        names.JOBSET_LABEL_UID: "@GANGUID@",
        names.JOBSET_LABEL_REPLICATED_JOB: "workers",
        names.JOBSET_LABEL_JOB_INDEX: "@JOBINDEX@",
        names.JOBSET_LABEL_RESTART_ATTEMPT: "0",
        "jobset.sigs.k8s.io/replicatedjob-replicas": "4",
        "jobset.sigs.k8s.io/job-key": "@GANGUID@",
        "jobset.sigs.k8s.io/job-global-index": "@JOBINDEX@",
        "kueue.x-k8s.io/queue-name": "training",
        "team.example.com/cost-center": "research-4711",
    }


def _managed(manager: str, at: str, fields: Json, subresource: str | None = None) -> Json:
    entry = {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": at,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    return entry if subresource is None else {**entry, "subresource": subresource}


def _fields_of(value: Any, key: str | None = None) -> Json:
    """The ``fieldsV1`` of a part of an object, as the API server writes it."""
    if isinstance(value, dict):
        return {f"f:{name}": _fields_of(item) for name, item in value.items() if name != key} | {".": {}}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        for by in ("name", "type", "mountPath", "uid"):
            if by in value[0]:
                return {".": {}} | {f'k:{{"{by}":"{item[by]}"}}': _fields_of(item) for item in value}
    return {}


def _container(name: str, variables: int) -> Json:
    return {
        "name": name,
        "image": f"europe-docker.pkg.dev/research-platform/images/{name}@sha256:{'8d1f' * 16}",
        "command": ["/usr/local/bin/entrypoint", "--config=/etc/config/run.yaml", f"--component={name}"],
        "env": [
            {"name": f"{name.upper()}_SETTING_{number:02}", "value": f"/mnt/{name}/value-{number:02}"}
            for number in range(variables)
        ],
        "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
        "volumeMounts": [
            {"name": f"volume-{number}", "mountPath": f"/mnt/{name}/volume-{number}"} for number in range(5)
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }


def _pod_spec(*containers: Json) -> Json:
    return {
        "volumes": [{"name": f"volume-{number}", "emptyDir": {"sizeLimit": "8Gi"}} for number in range(5)],
        "containers": list(containers),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "nodeName": "@NODE@",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {
                "key": "node.kubernetes.io/not-ready",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            },
            {
                "key": "node.kubernetes.io/unreachable",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            },
        ],
        "enableServiceLinks": False,
        "preemptionPolicy": "PreemptLowerPriority",
    }


def _pod_status(made: str, spec: Json) -> Json:
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": made} for kind in kinds],
        "hostIP": "10.1.2.3",
        "podIP": "@ADDRESS@",
        "podIPs": [{"ip": "@ADDRESS@"}],
        "startTime": made,
        "qosClass": "Burstable",
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "containerID": f"containerd://{'c0ffee42' * 8}",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": made}},
            }
            for container in spec["containers"]
        ],
    }


def _trainer_spec() -> Json:
    return _pod_spec(_container("trainer", 42), _container("telemetry", 10), _container("proxy", 10))


def _pod(made: str, labels: Json, owner: Json, spec: Json) -> Json:
    status = _pod_status(made, spec)
    network = [{"name": f"network-{number}", "interface": f"eth{number}", "mac": "", "dns": {}} for number in range(9)]
    annotations = {
        "k8s.v1.cni.cncf.io/network-status": json.dumps(network),
        "telemetry.example.com/config": "scrape=/metrics;port=9090;" * 20,
        "kueue.x-k8s.io/podset-unconstrained-topology": "true",
    }
    created = {"f:metadata": {"f:labels": _fields_of(labels), "f:annotations": _fields_of(annotations)}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "@NAME@",
            "namespace": "@NAMESPACE@",
            "uid": "@UID@",
            "creationTimestamp": made,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owner],
            "managedFields": [
                _managed("kube-controller-manager", made, {**created, "f:spec": _fields_of(spec)}),
                _managed("kubelet", made, {"f:status": _fields_of(status)}, "status"),
            ],
        },
        "spec": spec,
        "status": status,
    }


def training_pod(made: str) -> Json:
    labels = {
        **_gang_labels(),
        "batch.kubernetes.io/job-name": "@JOB@",
        "batch.kubernetes.io/controller-uid": "@JOBUID@",
        "batch.kubernetes.io/job-completion-index": "@INDEX@",
        "job-name": "@JOB@",
        "controller-uid": "@JOBUID@",
    }
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "@JOB@", "uid": "@JOBUID@", "controller": True}
    return _pod(made, labels, owner, _trainer_spec())


def web_pod(made: str) -> Json:
    labels = {"app": "front", "pod-template-hash": "6f9c8d7b5", "team.example.com/cost-center": "web-1"}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "front-6f9c8d7b5", "uid": "@UID@"}
    return _pod(made, labels, owner, _pod_spec(_container("front", 8)))


def server_pod(made: str) -> Json:
    """A snapshot server."""
    labels = {names.LABEL_SNAPSHOT_SERVER: SERVERS, "controller-revision-hash": "6f9c8d7b5"}
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": SERVERS, "uid": "@UID@", "controller": True}
    return _pod(made, labels, owner, _pod_spec(_container("snapshots", 8)))


def _template() -> Json:
    spec = {name: value for name, value in _trainer_spec().items() if name != "nodeName"}
    return {"metadata": {"labels": {names.LABEL_POLICY: POLICY}}, "spec": spec}


def _job_spec() -> Json:
    return {
        "parallelism": PODS_A_JOB,
        "completions": PODS_A_JOB,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "suspend": False,
        "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": "@UID@"}},
        "template": _template(),
    }


def job(made: str) -> Json:
    spec = _job_spec()
    status = {"active": PODS_A_JOB, "ready": PODS_A_JOB, "startTime": made}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "@NAME@",
            "namespace": "@NAMESPACE@",
            "uid": "@UID@",
            "creationTimestamp": made,
            "generation": 1,
            "labels": _gang_labels(),
            "managedFields": [
                _managed("manager", made, {"f:spec": _fields_of(spec)}),
                _managed("kube-controller-manager", made, {"f:status": _fields_of(status)}, "status"),
            ],
        },
        "spec": spec,
        "status": status,
    }


def jobset(made: str, jobs: int) -> Json:
    job = {**_job_spec()}
    del job["selector"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "@GANG@",
            "namespace": "@NAMESPACE@",
            "uid": "@GANGUID@",
            "creationTimestamp": made,
            "generation": 1,
            "labels": {names.LABEL_POLICY: POLICY},
        },
        "spec": {"replicatedJobs": [{"name": "workers", "replicas": jobs, "template": {"spec": job}}]},
        "status": {"restarts": 0, "replicatedJobsStatus": []},
    }


def node(made: str) -> Json:
    labels = {
        "kubernetes.io/hostname": "@NAME@",
        "node.kubernetes.io/instance-type": "a3-megagpu-8g",
        "topology.kubernetes.io/zone": "europe-west4-b",
        "topology.kubernetes.io/region": "europe-west4",
        "cloud.google.com/gke-nodepool": "a3-mega",
        **{f"cloud.google.com/gke-feature-{number:02}": "true" for number in range(20)},
    }
    amounts = {"cpu": "208", "memory": "1932735283Ki", "nvidia.com/gpu": str(_GPUS), "pods": "110"}
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready", "NetworkUnavailable", "KernelDeadlock")
    status = {
        "capacity": amounts,
        "allocatable": amounts,
        "conditions": [
            {
                "type": kind,
                "status": "True" if kind == "Ready" else "False",
                "reason": "KubeletHasEnough",
                "message": "kubelet has sufficient resources available",
                "lastHeartbeatTime": made,
                "lastTransitionTime": made,
            }
            for kind in kinds
        ],
        "images": [
            {
                "names": [
                    f"europe-docker.pkg.dev/research-platform/images/tool-{number:02}@sha256:{'5b2e' * 16}",
                    f"europe-docker.pkg.dev/research-platform/images/tool-{number:02}:v1.{number}",
                ],
                "sizeBytes": 123_456_789 + number,
            }
            for number in range(50)
        ],
        "nodeInfo": {"machineID": "@UID@", "kubeletVersion": "v1.34.4", "osImage": "Container-Optimized OS"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "@NAME@",
            "uid": "@UID@",
            "creationTimestamp": made,
            "labels": labels,
            "managedFields": [
                _managed("kubelet", made, {"f:metadata": {"f:labels": _fields_of(labels)}}),
                _managed("kubelet", made, {"f:status": _fields_of({**status, "images": {}})}, "status"),
            ],
        },
        "spec": {"providerID": "gce://research/europe-west4-b/@NAME@"},
        "status": status,
    }
