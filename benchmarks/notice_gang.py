"""A JobSet with many pods, as objects in the API alone: nobody runs them.

The objects are as JobSet, the Job controller, the scheduler and kubelet would have written them; each pod has a token
that the API server has bound to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.workloads import JOBSETS

NAMESPACE = "big"
POLICY = "policy"
#: A sure signal that may go away again, so that the next notice can follow; its deadline is the grace period.
TAINT = "aws-node-termination-handler/scheduled-maintenance"
GRACE_S = 120
_PODS_A_NODE = 4
_ACCOUNT = "trainer"
_ACCOUNTS = Kind("/api/v1", "serviceaccounts")
_TOKENS = Kind(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{_ACCOUNT}", "token")
_JOB = "train-workers-0"


@dataclasses.dataclass(frozen=True)
class Member:
    """One pod: what its environment tells the library, and its place in the gang."""

    settings: dict[str, Any]
    index: int
    count: int


async def make(api: KubeClient, count: int, folder: Path) -> list[Member]:
    """Makes nodes, policy, JobSet, Job and so many running pods; returns the pods, whose tokens lie in ``folder``."""
    await api.create(objects.NAMESPACES, None, {"metadata": {"name": NAMESPACE}})
    await api.create(_ACCOUNTS, NAMESPACE, {"metadata": {"name": _ACCOUNT}})
    await api.create(objects.POLICIES, NAMESPACE, _policy())
    jobset = await api.create(JOBSETS, NAMESPACE, _jobset(count))
    workload_uid = str(jobset["metadata"]["uid"])
    await api.create(objects.JOBS, NAMESPACE, _job(count, workload_uid))
    await _all(_make_node(api, index) for index in range(-(-count // _PODS_A_NODE)))
    return await _all(_make_pod(api, index, count, workload_uid, folder) for index in range(count))


async def taint(api: KubeClient, index: int, value: str | None) -> None:
    """Puts the taint on a node, with a value that tells it from the one before; None takes it off."""
    taints = [] if value is None else [{"key": TAINT, "value": value, "effect": "NoSchedule"}]
    await api.merge(objects.NODES, None, _node_name(index), {"spec": {"taints": taints}})


async def deadline_at(api: KubeClient, preemption: str) -> float:
    """A recorded preemption's deadline, in seconds since the epoch."""
    body = await api.get(objects.PREEMPTIONS, NAMESPACE, preemption)
    return datetime.datetime.fromisoformat(body["spec"]["deadline"]).timestamp()


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls)


def _node_name(index: int) -> str:
    return f"node-{index}"


async def _make_node(api: KubeClient, index: int) -> None:
    name = _node_name(index)
    await api.create(
        objects.NODES, None, {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {}}
    )
    await taint(api, index, None)  # admission gives a new node the taint of one that is not ready


async def _make_pod(api: KubeClient, index: int, count: int, workload_uid: str, folder: Path) -> Member:
    name = f"{_JOB}-{index}-abcde"
    made = await api.create(objects.PODS, NAMESPACE, _pod(name, index, workload_uid))
    uid = str(made["metadata"]["uid"])
    await api.merge_status(objects.PODS, NAMESPACE, name, {"status": _running()})
    bound_to = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    answer = await api.create(
        _TOKENS, None, {"spec": {"audiences": [names.TOKEN_AUDIENCE], "boundObjectRef": bound_to}}
    )
    token_file = folder / str(index)
    token_file.write_text(answer["status"]["token"])
    settings = {
        "namespace": NAMESPACE,
        "pod_name": name,
        "pod_uid": uid,
        "jobset_uid": workload_uid,
        "token_file": str(token_file),
    }
    return Member(settings, index, count)


def _policy() -> JsonObject:
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "CheckpointPolicy",
        "metadata": {"name": POLICY},
        "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}},
    }


def _containers() -> list[JsonObject]:
    return [{"name": "trainer", "image": "trainer"}]


def _template() -> JsonObject:
    return {
        "metadata": {"labels": {names.LABEL_POLICY: POLICY}},
        "spec": {"restartPolicy": "Never", "containers": _containers()},
    }


def _jobset(count: int) -> JsonObject:
    job = {"parallelism": count, "completions": count, "completionMode": "Indexed", "template": _template()}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "train", "labels": {names.LABEL_POLICY: POLICY}},
        "spec": {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]},
    }


def _labels(workload_uid: str) -> dict[str, str]:
    return {
        names.JOBSET_LABEL_NAME: "train",
        names.JOBSET_LABEL_UID: workload_uid,
        names.JOBSET_LABEL_REPLICATED_JOB: "workers",
        names.JOBSET_LABEL_JOB_INDEX: "0",
        names.JOBSET_LABEL_RESTART_ATTEMPT: "0",
    }


def _job(count: int, workload_uid: str) -> JsonObject:
    return {
        "metadata": {"name": _JOB, "labels": _labels(workload_uid)},
        "spec": {"parallelism": count, "completions": count, "completionMode": "Indexed", "template": _template()},
    }


def _pod(name: str, index: int, workload_uid: str) -> JsonObject:
    return {
        "metadata": {
            "name": name,
            "labels": {
                **_labels(workload_uid),
                names.LABEL_POLICY: POLICY,
                "batch.kubernetes.io/job-name": _JOB,
                "batch.kubernetes.io/job-completion-index": str(index),
            },
        },
        "spec": {
            "nodeName": _node_name(index // _PODS_A_NODE),
            "serviceAccountName": _ACCOUNT,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": _containers(),
        },
    }


def _running() -> JsonObject:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"status": "True", "lastTransitionTime": now}
    return {
        "phase": "Running",
        "startTime": now,
        "conditions": [{"type": kind, **condition} for kind in ("PodScheduled", "Initialized", "Ready")],
        "containerStatuses": [
            {
                "name": "trainer",
                "image": "trainer",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
        ],
    }
