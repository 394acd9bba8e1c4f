"""The size that a workload has now, for pods that are created after somebody changed it.

The number of processes is written into the pod templates when the workload is created, and templates cannot change. If
the policy has ``training.minProcesses``, the size may: a person, Kueue or an autoscaler changes ``parallelism`` and
``completions``. The webhook then writes the present number into each new pod.

``of_workload`` and ``resized_pod`` are pure. A ``SharedReads`` belongs to one event loop; its tasks end with their
reads.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from gracepoint.wire import names
from gracepoint.wire.names import LABEL_POLICY, LABEL_ROLE, ROLE_HELPER, Env
from gracepoint_operator.webhooks.training_jobs import Json

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class MemberPlace:
    """Where the pods of one member of a gang stand among its processes.

    Attributes:
        process_count: Number of processes of the gang.
        process_offset: Number of processes of the members before this one.
        pods_per_job: Number of pods of one Job of the member.
    """

    process_count: int
    process_offset: int
    pods_per_job: int


def of_workload(workload: Json) -> dict[str, MemberPlace]:
    """Returns the places that the members of an injected JobSet or Job have now.

    They are keyed by the name of the replicatedJob. A Job has one member, with an empty name.
    """
    if workload.get("kind") == "Job":
        pods = pods_per_job(workload["spec"])
        return {"": MemberPlace(pods, 0, pods)}
    members = [
        (job["name"], int(job.get("replicas", 1)), pods_per_job(job["template"]["spec"]))
        for job in workload["spec"]["replicatedJobs"]
        if is_member(job["template"]["spec"]["template"])
    ]
    count = sum(replicas * pods for _, replicas, pods in members)
    places, offset = {}, 0
    for name, replicas, pods in members:
        places[name] = MemberPlace(count, offset, pods)
        offset += replicas * pods
    return places


def is_member(template: Json) -> bool:
    """Returns whether the pods of an injected template are processes of a gang."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return LABEL_POLICY in labels and labels.get(LABEL_ROLE) != ROLE_HELPER


def is_elastic(pod: Json) -> bool:
    """Returns whether the size of the pod's gang may change."""
    return any(
        variable["name"] == Env.MIN_PROCESSES
        for container in pod.get("spec", {}).get("containers") or []
        for variable in container.get("env") or []
    )


def resized_pod(pod: Json, places: dict[str, MemberPlace]) -> Json:
    """Returns the pod with the place that it has now. A pod whose member is not known is not changed."""
    labels = pod.get("metadata", {}).get("labels") or {}
    place = places.get(labels.get(names.JOBSET_LABEL_REPLICATED_JOB, ""))
    if place is None:
        return pod
    now = {
        Env.PROCESS_COUNT: place.process_count,
        Env.PROCESS_OFFSET: place.process_offset,
        Env.PODS_PER_JOB: place.pods_per_job,
    }
    made = copy.deepcopy(pod)
    for container in made["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable["name"] in now and "value" in variable:
                variable["value"] = str(now[variable["name"]])
    return made


class SharedReads(Generic[K, V]):
    """Reads a value for many who ask at once, and never answers with a read that began before the question.

    A thousand pods of a gang are created within seconds. Each must get the size that the workload had at its creation
    or later, and the API server must not be asked a thousand times.

    Args:
        read: Reads the value.
        within_s: Seconds for each read. Who asks during a read waits for the rest of it, and then for the next one.
    """

    def __init__(self, read: Callable[[K], Awaitable[V]], within_s: float) -> None:
        self._read = read
        self._within_s = within_s
        self._current: dict[K, asyncio.Task[V]] = {}
        self._next: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K) -> V:
        """Returns the value. Raises what the read raises, or TimeoutError."""
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._after_current(key), name=f"read {key}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        return await asyncio.shield(task)

    async def _after_current(self, key: K) -> V:
        current = self._current.get(key)
        if current is not None:
            await asyncio.wait([current])
        task = self._next.pop(key)
        self._current[key] = task
        try:
            async with asyncio.timeout(self._within_s):
                return await self._read(key)
        finally:
            if self._current.get(key) is task:
                del self._current[key]


def pods_per_job(job: Json) -> int:
    """Returns how many pods of a Job run at once, from the Job's spec."""
    return int(job.get("parallelism") or 1)
