"""Later changes of a workload: what its creation filled in is kept, and new pods get the size that it has now.

``routes``, ``admission`` and the command line call it. It calls ``training_jobs``. All is pure, but ``SharedReads``:
it belongs to one event loop, and its tasks end with their reads.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from gracepoint.wire import names
from gracepoint.wire.names import ENV_PREFIX, LABEL_POLICY, LABEL_ROLE, ROLE_HELPER, Env
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks.training_jobs import Json, Problems, gang
from gracepoint_operator.workloads import CREATED_WITH

#: On a JobSet: the policy, its generation, and the fields that were added or changed. On its pods: the policy, its
#: generation, and the container.
ANNOTATION = "gracepoint.dev/injected"
#: Lists of objects with names. For other lists, only the list itself is named as changed.
_NAMED = ("replicatedJobs", "containers")


def shown(before: Json, injected: Json, policy: CheckpointPolicy) -> Json:
    """Returns ``injected`` with annotations that say how it differs from ``before``, and what it was created with.

    Fields from an earlier call stay listed: the API server may call twice if another webhook changes the object.
    """
    fields = [path for key in ("metadata", "spec") for path in _changed(before.get(key), injected.get(key), key)]
    spec = json.dumps(policy.spec.to_json(), separators=(",", ":"), sort_keys=True)
    if not fields and ((injected.get("metadata") or {}).get("annotations") or {}).get(CREATED_WITH) == spec:
        return injected
    injected = copy.deepcopy(injected)
    metadata = injected.setdefault("metadata", {})
    metadata["annotations"] = {**(metadata.get("annotations") or {}), CREATED_WITH: spec}
    if not fields:
        return injected
    about = {"policy": policy.name, "generation": policy.generation}
    for member in gang(injected, policy.spec.training, Problems()):
        _annotate(member.template.setdefault("metadata", {}), {**about, "container": member.container["name"]})
    _annotate(metadata, {**about, "fields": sorted({*_earlier(metadata), *fields})})
    return injected


def not_understood(policy: CheckpointPolicy) -> list[str]:
    """Returns warnings about parts of the policy that have no effect."""
    return [
        f"CheckpointPolicy {policy.name}: found {item}, which this version of Gracepoint does not know and passes over"
        for item in policy.unknown
        if item.startswith("spec")
    ]


def overruled(before: Json, injected: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns warnings about variables of the manifest that Gracepoint overrides."""
    warnings = []
    members_before = gang(copy.deepcopy(before), policy.spec.training, Problems())
    members_after = gang(copy.deepcopy(injected), policy.spec.training, Problems())
    for member, after in zip(members_before, members_after, strict=True):
        now = {variable["name"]: variable for variable in after.container.get("env") or []}
        names = [
            variable["name"]
            for variable in member.container.get("env") or []
            if variable["name"].startswith(ENV_PREFIX) and now.get(variable["name"]) != variable
        ]
        if names:
            warnings.append(
                f"{member.path}.template.spec.containers[{member.container['name']}].env: Gracepoint sets "
                f"{', '.join(sorted(set(names)))} by itself; the values of the manifest are not used"
            )
    return warnings


def _annotate(metadata: Json, value: Json) -> None:
    text = json.dumps(value, separators=(",", ":"))
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: text}


def _earlier(metadata: Json) -> list[str]:
    try:
        fields = json.loads((metadata.get("annotations") or {})[ANNOTATION])["fields"]
        return [field for field in fields if isinstance(field, str)]
    except (KeyError, ValueError, TypeError):
        return []  # there is no annotation, or a user wrote it by hand


def _changed(before: Any, after: Any, path: str) -> Iterator[str]:
    """Yields the paths of fields that are new or different in ``after``."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in after.items():
            yield from _changed(before.get(key), value, f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and path.endswith(_NAMED):
        items_before = {item.get("name"): item for item in before}
        for item in after:
            yield from _changed(items_before.get(item.get("name")), item, f"{path}[{item.get('name')}]")
    else:
        yield path


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class MemberPlace:
    """Where the pods of one member of a gang stand among its processes.

    The number of processes is written into the pod templates when the workload is created, and templates cannot
    change. If the policy has ``training.minProcesses``, the size may: a person, Kueue or an autoscaler changes
    ``parallelism`` and ``completions``. The webhook then writes the present number into each new pod.

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
    resized = copy.deepcopy(pod)
    for container in resized["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable["name"] in now and "value" in variable:
                variable["value"] = str(now[variable["name"]])
    return resized


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


#: What the annotation names if the label was added: all labels if there were none.
_LABEL_PATHS = ("metadata.labels", f"metadata.labels.{LABEL_POLICY}")


def keep_fields(old: Json, new: Json) -> tuple[Json, list[str]]:
    """Returns ``new`` with the fields that were filled in at the creation of ``old``.

    The Kubeflow Trainer applies the whole JobSet of a suspended TrainJob again, and so do GitOps tools. Fields that the
    manifest does not have stay by themselves. A list that is in the manifest replaces the stored one, such as the rules
    of a failure policy. The change would be refused, as these fields of a JobSet are immutable, and the job would not
    resume. So the fields that the annotation names get their stored values again, under the policy as it was at the
    creation.

    Args:
        old: The stored object.
        new: What it is going to be replaced by.

    Returns:
        The object, and the paths of the fields whose values in ``new`` were given up. A field that ``new`` lacks is
        restored, and not in this list.
    """
    annotation = (old.get("metadata", {}).get("annotations") or {}).get(ANNOTATION)
    if annotation is None:
        return new, []
    restored = copy.deepcopy(new)
    spec = restored.setdefault("spec", {})
    filled_in = json.loads(annotation).get("fields", [])
    if any(path in filled_in for path in _LABEL_PATHS):
        _keep_label(old.get("metadata") or {}, restored.setdefault("metadata", {}))
    fields = [path for path in filled_in if path.startswith("spec.")]
    given_up = [path for path in fields if _keep(old["spec"], spec, path.removeprefix("spec."))]
    resized = _completions_follow(old["spec"], restored["spec"])
    given_up = [path for path in given_up if path not in resized]
    _keep_annotation(old.get("metadata") or {}, restored.setdefault("metadata", {}))
    jobs = {job.get("name"): job for job in restored["spec"].get("replicatedJobs") or []}
    for job in old["spec"].get("replicatedJobs") or []:
        if job.get("name") in jobs:
            _keep_annotation(_pod_metadata(job), _pod_metadata(jobs[job["name"]]))
    return restored, given_up


def _keep_label(old: Json, new: Json) -> None:
    """The manifest names no policy, and the namespace's default was chosen at the creation."""
    name = (old.get("labels") or {}).get(LABEL_POLICY)
    if name is not None:
        new["labels"] = {LABEL_POLICY: name, **(new.get("labels") or {})}


def changed_sizes(old: Json, new: Json) -> list[str]:
    """Returns warnings about members of the gang whose changed size their pods cannot know of.

    Args:
        old: The stored object.
        new: What it is going to be replaced by.
    """
    jobs_after = _jobs(new)
    return [
        f"spec.replicatedJobs[{name}]: found another number of pods than at the JobSet's creation, which stays in the "
        f"pods ({Env.PROCESS_COUNT}), so they will fail. Create the JobSet again, under a policy with "
        "spec.training.minProcesses if its size is to change later"
        for name, job in _jobs(old).items()
        if name in jobs_after
        and is_member(job["template"])
        and not is_elastic(job["template"])
        and pods_per_job(job) != pods_per_job(jobs_after[name])
    ]


def _completions_follow(old: Json, new: Json) -> set[str]:
    """Lets the completions follow a changed parallelism, as at the creation. Returns the paths of these completions.

    Only for members of the gang whose new pods get the present size. Other Jobs may have more completions than pods.
    """
    jobs_after = _jobs({"spec": new})
    paths = set()
    for name, job in _jobs({"spec": old}).items():
        parallelism = jobs_after.get(name, {}).get("parallelism")
        if parallelism is None or parallelism == job.get("parallelism"):
            continue
        template = job["template"]
        if is_member(template) and is_elastic(template) and job.get("completions") == job.get("parallelism"):
            jobs_after[name]["completions"] = parallelism
            paths.add(f"spec.replicatedJobs[{name}].template.spec.completions")
    return paths


def _jobs(jobset: Json) -> dict[str, Json]:
    """The specs of the Jobs by the names of their replicatedJobs."""
    return {job.get("name", ""): job["template"]["spec"] for job in jobset["spec"].get("replicatedJobs") or []}


def _keep(old: Any, new: Any, path: str) -> bool:
    """Copies the value at a path. Returns True if another value is lost."""
    key, rest = _step(old, path)
    if key is None or key not in old:
        return False
    if rest.startswith("["):
        name, _, rest = rest[1:].partition("]")
        before, after = (_named(items.get(key), name) for items in (old, new))
        if before is None or after is None:
            return False  # a replicatedJob or container that is not there any more
        return _keep(before, after, rest.removeprefix("."))
    if rest:
        if not isinstance(new.get(key), dict):
            new[key] = {}
        return _keep(old[key], new[key], rest.removeprefix("."))
    present = new.get(key)
    if isinstance(old[key], dict) and isinstance(present, dict):
        # Others may add keys while the JobSet is suspended, as Kueue does with labels.
        lost = [_keep({name: value}, present, name) for name, value in old[key].items()]
        return any(lost)
    new[key] = copy.deepcopy(old[key])
    return present is not None and present != old[key]


def _step(node: Any, path: str) -> tuple[str | None, str]:
    """Returns the first key of the path and what follows it. A key may itself contain dots."""
    keys = node if isinstance(node, dict) else {}
    fits = [key for key in keys if path == key or path.startswith((f"{key}.", f"{key}["))]
    key = max(fits, key=len, default=None)
    return key, "" if key is None else path[len(key) :]


def _named(items: Any, name: str) -> Json | None:
    return next((item for item in items or () if item.get("name") == name), None)


def _pod_metadata(job: Json) -> Json:
    metadata: Json = (
        job.setdefault("template", {}).setdefault("spec", {}).setdefault("template", {}).setdefault("metadata", {})
    )
    return metadata


def _keep_annotation(old: Json, new: Json) -> None:
    old_annotations = old.get("annotations") or {}
    kept = {name: old_annotations[name] for name in (ANNOTATION, CREATED_WITH) if name in old_annotations}
    if kept:
        new["annotations"] = {**(new.get("annotations") or {}), **kept}
