"""A gang whose objects a test writes to a real API server, in the place of the controllers, and a replica of the
operator's core that reads them there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.frames import Frame, Notice
from gracepoint.wire.messages import Acknowledgement, Phase, Subscription
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.decisions.policy_conditions import PodRights
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.workloads import JOBSETS
from tests.testcluster.api_server import ApiServer
from tests.unit.operator.fakes.replica import report

Body = dict[str, Any]

TAINT = "cloud.google.com/impending-node-termination"
_WAIT_S = 60.0
_LOOK_EVERY_S = 0.05
_NAMESPACES = objects.NAMESPACES


class Gang:
    """One JobSet of two pods on two nodes, in a namespace of its own.

    Attributes:
        name: Of the namespace; the nodes' names begin with it.
        jobset_uid: Known once it is made.
    """

    def __init__(self, server: ApiServer, api: KubeClient, name: str) -> None:
        self.server = server
        self.api = api
        self.name = name
        self.workload_uid = ""
        self.attempt = 0

    async def make(self) -> None:
        """Everything that trains."""
        await self.make_namespace()
        await self.api.create(objects.POLICIES, self.name, self.policy())
        labels = {names.LABEL_POLICY: "careful"}
        jobset = await self.api.create(
            JOBSETS,
            self.name,
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": {"name": "train", "labels": labels},
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "workers",
                            "template": {"spec": {"template": {"metadata": {"labels": labels}, "spec": _pod_spec()}}},
                        }
                    ]
                },
            },
        )
        self.workload_uid = str(jobset["metadata"]["uid"])
        await self.make_nodes()
        await self.run_attempt(0)

    async def make_namespace(self) -> None:
        with contextlib.suppress(client.AlreadyExists):
            await self.api.create(_NAMESPACES, None, {"metadata": {"name": self.name}})

    async def make_nodes(self) -> None:
        for index in (0, 1):
            await self.api.create(objects.NODES, None, {"metadata": {"name": self.node(index)}})

    def policy(self, **spec: object) -> Body:
        return {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": "CheckpointPolicy",
            "metadata": {"name": "careful"},
            "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}, **spec},
        }

    def node(self, index: int) -> str:
        return f"{self.name}-{index}"

    def pod(self, index: int) -> str:
        return f"train-workers-0-{index}-{self.attempt}"

    async def run_attempt(self, attempt: int) -> None:
        """JobSet makes the Job and its pods anew."""
        if attempt:
            for index in (0, 1):
                self.server.kubectl("delete", "pod", self.pod(index), f"--namespace={self.name}", "--force")
            self.server.kubectl("delete", "job", "train-workers-0", f"--namespace={self.name}", "--cascade=background")
        self.attempt = attempt
        await self.api.merge_status(JOBSETS, self.name, "train", {"status": _jobset_status(attempt)})
        labels = {
            names.JOBSET_LABEL_UID: self.workload_uid,
            names.JOBSET_LABEL_NAME: "train",
            names.JOBSET_LABEL_REPLICATED_JOB: "workers",
            names.JOBSET_LABEL_RESTART_ATTEMPT: str(attempt),
        }
        pod_labels = {**labels, names.LABEL_POLICY: "careful"}
        job = await self.api.create(
            objects.JOBS,
            self.name,
            {
                "metadata": {"name": "train-workers-0", "labels": labels},
                "spec": {
                    "completions": 2,
                    "parallelism": 2,
                    "completionMode": "Indexed",
                    "backoffLimit": 0,
                    "template": {"metadata": {"labels": pod_labels}, "spec": _pod_spec()},
                },
            },
        )
        for index in (0, 1):
            of_job = {
                "batch.kubernetes.io/job-name": "train-workers-0",
                "batch.kubernetes.io/controller-uid": str(job["metadata"]["uid"]),
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            meta = {"name": self.pod(index), "labels": {**pod_labels, **of_job}}
            await self.api.create(objects.PODS, self.name, {"metadata": meta, "spec": self.pod_spec(index)})
        await self.bind()
        for index in (0, 1):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = {
                "phase": "Running",
                "conditions": [
                    {"type": kind, "status": "True", "lastTransitionTime": at} for kind in ("PodScheduled", "Ready")
                ],
            }
            await self.api.merge_status(objects.PODS, self.name, self.pod(index), {"status": status})

    def pod_spec(self, index: int) -> Body:
        return _pod_spec() | {"nodeName": self.node(index)}

    async def bind(self) -> None:
        """Waits until the pods have nodes. Here they have them from the start."""

    async def taint(self, index: int, *, on: bool = True) -> None:
        taints = [{"key": TAINT, "effect": "NoSchedule"}] if on else None
        await self.api.merge(objects.NODES, None, self.node(index), {"spec": {"taints": taints}})

    def epoch(self, number: int) -> str:
        return f"train-{self.workload_uid[:8]}-{number}"

    async def records(self) -> list[JsonObject]:
        return (await self.api.list(objects.PREEMPTIONS, namespace=self.name)).items

    async def requests(self) -> list[JsonObject]:
        return (await self.api.list(objects.REQUESTS, namespace=self.name)).items

    async def is_refused(self) -> bool:
        """True if the API server refuses to make a Preemption here."""
        body = {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": "Preemption",
            "metadata": {"name": "trial"},
            "spec": {
                "jobSet": {"name": "nobody", "uid": "u-1"},
                "epoch": 1,
                "cause": "Drain",
                "signal": "a cordon",
                "confidence": "sure",
                "cancelable": True,
                "mode": "Observe",
                "observedAt": "2026-01-02T03:04:05Z",
                "deadline": "2026-01-02T03:05:05Z",
                "policy": {"name": "careful", "spec": {}},
            },
        }
        try:
            await self.api.delete(objects.PREEMPTIONS, await self.api.create(objects.PREEMPTIONS, self.name, body))
        except client.Refused:
            return True
        return False

    async def policy_condition(self, kind: str) -> JsonObject:
        """The condition of that type of the policy; empty where there is none."""
        status = (await self.api.get(objects.POLICIES, self.name, "careful")).get("status", {})
        return next((item for item in status.get("conditions", []) if item["type"] == kind), {})


class Replica:
    """A replica's core, to which the test brings what the watches would."""

    def __init__(
        self,
        gang: Gang,
        name: str,
        *,
        devices: bool = False,
        clock: Callable[[], float] = time.time,
        deletes_pods: bool = False,
    ) -> None:
        self.gang = gang
        self.api = gang.api
        self.metrics = Metrics()
        settings = ControllerSettings(
            name,
            write_interval_s=0.05,
            rights=PodRights(protects=True, deletes=deletes_pods),
            watches_devices=devices,
        )
        self.core = Controller(self.api, self.metrics, clock, settings)

    async def watch(self) -> None:
        """Brings every object as it is now, and deletions of those that are gone."""
        of_gang = (
            objects.NODES,
            JOBSETS,
            objects.JOBS,
            objects.PODS,
            objects.POLICIES,
            objects.PREEMPTIONS,
            objects.REQUESTS,
        )
        for kind in (objects.NAMESPACES, objects.CLUSTER_POLICIES, *of_gang):
            bodies = (await self.api.list(kind)).items
            for uid in self.core.cache.uids(kind) - {body["metadata"]["uid"] for body in bodies}:
                self.core.feed(kind, "DELETED", {"metadata": {"uid": uid}})
            for body in bodies:
                labels = body["metadata"].get("labels") or {}
                if kind not in (objects.JOBS, objects.PODS) or names.JOBSET_LABEL_UID in labels:
                    self.core.feed(kind, "MODIFIED", body)
        await asyncio.sleep(0)

    async def connect(self, index: int) -> Subscriber:
        """A process that subscribes, as the channel admits it."""
        pod = await self.api.get(objects.PODS, self.gang.name, self.gang.pod(index))
        subscriber = self.core.subscribers.add(
            Subscription(
                namespace=self.gang.name,
                pod_name=self.gang.pod(index),
                pod_uid=pod["metadata"]["uid"],
                session=f"s-{self.gang.attempt}",
                workload_uid=self.gang.workload_uid,
                restart_attempt=self.gang.attempt,
                process_index=index,
                process_count=2,
                library_version="0.1.0",
                takes_hints=True,
            )
        )
        self.core.notifier.catch_up(subscriber)
        return subscriber

    async def acknowledge(self, index: int, preemption: str) -> None:
        """A process acknowledges the notice."""
        pod = self._pod(index)
        session = f"s-{self.gang.attempt}"
        message = Acknowledgement(pod_uid=pod.uid, session=session, preemption=preemption, process_index=index)
        await self.core.reports.take(pod, message)

    async def report(self, phase: Phase, preemption: str) -> None:
        """The gang's primary process reports."""
        pod = self._pod(0)
        said = dataclasses.replace(
            report(phase, preemption=preemption),
            pod_uid=pod.uid,
            session=f"s-{self.gang.attempt}",
            workload_uid=self.gang.workload_uid,
            message="",
        )
        await self.core.reports.take(pod, said)

    def _pod(self, index: int) -> Pod:
        pod = self.core.cache.objects.pod_named(self.gang.name, self.gang.pod(index))
        assert pod is not None
        return pod

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def running(
    gang: Gang,
    name: str = "replica-a",
    *,
    devices: bool = False,
    clock: Callable[[], float] = time.time,
    deletes_pods: bool = False,
) -> AsyncIterator[Replica]:
    """A replica that has listed the cluster. ``devices``: it also looks at taints of devices.

    Raises:
        AssertionError: It ended, or did not become ready in time.
    """
    replica = Replica(gang, name, devices=devices, clock=clock, deletes_pods=deletes_pods)
    task = asyncio.create_task(replica.core.run())
    try:
        await until(lambda: replica.core.ready or task.done(), "the replica to be ready")
        if task.done():
            raise AssertionError("the replica ended as it listed the cluster") from task.exception()
        yield replica
        assert not task.done(), f"the replica ended: {task.exception()!r}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told(subscriber: Subscriber) -> Notice:
    """The next notice in a subscriber's queue, written as its stream would."""
    frame: Frame | None = None
    try:
        async with asyncio.timeout(_WAIT_S):
            while not isinstance(frame, Notice):
                outgoing = await subscriber.next()
                assert outgoing is not None, "the stream was closed, expected a notice"
                frame = outgoing.make()
                outgoing.sent()
                outgoing.written()
    except TimeoutError:
        raise AssertionError(f"waited {_WAIT_S:.0f} s for a notice to {subscriber.hello.pod_name}, in vain") from None
    return frame


async def until(holds: Any, what: str, *, within_s: float = _WAIT_S) -> Any:
    """Waits until ``holds()``, which may be a coroutine function, is true; returns what it gave."""
    found: Any = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                found = holds()
                if asyncio.iscoroutine(found):
                    with contextlib.suppress(client.NotFound):
                        found = await found
                if found:
                    return found
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise AssertionError(f"waited {within_s:.0f} s for: {what}; found {found!r}") from None


def _pod_spec() -> Body:
    return {"restartPolicy": "Never", "containers": [{"name": "train", "image": "train"}]}


def _jobset_status(attempt: int) -> Body:
    return {"restarts": attempt}
