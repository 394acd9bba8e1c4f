"""Shows users how a JobSet was changed: annotations on it and on its pods, and warnings at its creation. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from gracepoint.wire.names import ENV_PREFIX
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks.training_jobs import Json, Problems, gang
from gracepoint_operator.workloads import CREATED_WITH

#: On a JobSet: the policy, its generation, and the fields that were added or changed. On its pods: the policy, its
#: generation, and the container.
ANNOTATION = "gracepoint.dev/injected"
#: Lists of objects with names. For other lists, only the list itself is named as changed.
_NAMED = ("replicatedJobs", "containers")


def shown(before: Json, made: Json, policy: CheckpointPolicy) -> Json:
    """Returns ``made`` with annotations that say how it differs from ``before``, and what it was created with.

    Fields from an earlier call stay listed: the API server may call twice if another webhook changes the object.
    """
    fields = [path for key in ("metadata", "spec") for path in _changed(before.get(key), made.get(key), key)]
    spec = json.dumps(policy.spec.to_json(), separators=(",", ":"), sort_keys=True)
    if not fields and ((made.get("metadata") or {}).get("annotations") or {}).get(CREATED_WITH) == spec:
        return made
    made = copy.deepcopy(made)
    metadata = made.setdefault("metadata", {})
    metadata["annotations"] = {**(metadata.get("annotations") or {}), CREATED_WITH: spec}
    if not fields:
        return made
    about = {"policy": policy.name, "generation": policy.generation}
    for member in gang(made, policy.spec.training, Problems()):
        _annotate(member.template.setdefault("metadata", {}), {**about, "container": member.container["name"]})
    _annotate(metadata, {**about, "fields": sorted({*_earlier(metadata), *fields})})
    return made


def not_understood(policy: CheckpointPolicy) -> list[str]:
    """Returns warnings about parts of the policy that have no effect."""
    return [
        f"CheckpointPolicy {policy.name}: found {item}, which this version of Gracepoint does not know and passes over"
        for item in policy.unknown
        if item.startswith("spec")
    ]


def overruled(before: Json, made: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns warnings about variables of the manifest that Gracepoint overrides."""
    warnings = []
    theirs = gang(copy.deepcopy(before), policy.spec.training, Problems())
    for member, ours in zip(theirs, gang(copy.deepcopy(made), policy.spec.training, Problems()), strict=True):
        now = {variable["name"]: variable for variable in ours.container.get("env") or []}
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
        known = {item.get("name"): item for item in before}
        for item in after:
            yield from _changed(known.get(item.get("name")), item, f"{path}[{item.get('name')}]")
    else:
        yield path
