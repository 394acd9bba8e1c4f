"""Keeps what was filled into a JobSet at its creation when somebody applies its manifest again. Pure.

The Kubeflow Trainer applies the whole JobSet of a suspended TrainJob again, and so do GitOps tools. Fields that the
manifest does not have stay by themselves. A list that is in the manifest replaces the stored one, such as the rules of
a failure policy. The change would be refused, as these fields of a JobSet are immutable, and the job would not resume.

So the fields that the annotation names get their stored values again, under the policy as it was at the creation.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from gracepoint.wire.names import LABEL_POLICY, Env
from gracepoint_operator.webhooks.training_jobs import Json
from gracepoint_operator.webhooks.updates.injected_annotation import ANNOTATION
from gracepoint_operator.webhooks.updates.present_size import is_elastic, is_member, pods_per_job
from gracepoint_operator.workloads import CREATED_WITH

#: What ``injected_annotation`` names if the label was added: all labels if there were none.
_LABEL_PATHS = ("metadata.labels", f"metadata.labels.{LABEL_POLICY}")


def keep_fields(old: Json, new: Json) -> tuple[Json, list[str]]:
    """Returns ``new`` with the fields that were filled in at the creation of ``old``.

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
    made = copy.deepcopy(new)
    spec = made.setdefault("spec", {})
    filled_in = json.loads(annotation).get("fields", [])
    if any(path in filled_in for path in _LABEL_PATHS):
        _keep_label(old.get("metadata") or {}, made.setdefault("metadata", {}))
    fields = [path for path in filled_in if path.startswith("spec.")]
    given_up = [path for path in fields if _keep(old["spec"], spec, path.removeprefix("spec."))]
    resized = _completions_follow(old["spec"], made["spec"])
    given_up = [path for path in given_up if path not in resized]
    _annotate(old.get("metadata") or {}, made.setdefault("metadata", {}))
    jobs = {job.get("name"): job for job in made["spec"].get("replicatedJobs") or []}
    for job in old["spec"].get("replicatedJobs") or []:
        if job.get("name") in jobs:
            _annotate(_pod_metadata(job), _pod_metadata(jobs[job["name"]]))
    return made, given_up


def _keep_label(old: Json, new: Json) -> None:
    """The manifest names no policy, and the namespace's default was chosen at the creation."""
    name = (old.get("labels") or {}).get(LABEL_POLICY)
    if name is not None:
        new["labels"] = {LABEL_POLICY: name, **(new.get("labels") or {})}


def changed_sizes(old: Json, made: Json) -> list[str]:
    """Returns warnings about members of the gang whose changed size their pods cannot know of.

    Args:
        old: The stored object.
        made: What it is going to be replaced by.
    """
    after = _jobs(made)
    return [
        f"spec.replicatedJobs[{name}]: found another number of pods than at the JobSet's creation, which stays in the "
        f"pods ({Env.PROCESS_COUNT}), so they will fail. Create the JobSet anew, under a policy with "
        "spec.training.minProcesses if its size is to change later"
        for name, job in _jobs(old).items()
        if name in after
        and is_member(job["template"])
        and not is_elastic(job["template"])
        and pods_per_job(job) != pods_per_job(after[name])
    ]


def _completions_follow(old: Json, made: Json) -> set[str]:
    """Lets the completions follow a changed parallelism, as at the creation. Returns the paths of these completions.

    Only for members of the gang whose new pods get the present size. Other Jobs may have more completions than pods.
    """
    after = _jobs({"spec": made})
    paths = set()
    for name, job in _jobs({"spec": old}).items():
        parallelism = after.get(name, {}).get("parallelism")
        if parallelism is None or parallelism == job.get("parallelism"):
            continue
        template = job["template"]
        if is_member(template) and is_elastic(template) and job.get("completions") == job.get("parallelism"):
            after[name]["completions"] = parallelism
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


def _annotate(old: Json, new: Json) -> None:
    known = old.get("annotations") or {}
    kept = {name: known[name] for name in (ANNOTATION, CREATED_WITH) if name in known}
    if kept:
        new["annotations"] = {**(new.get("annotations") or {}), **kept}
