"""Keeping new pods off nodes that are going away. Pure.

A label or condition does not keep the scheduler away, and a taint may be tolerated: without this a restarted
job can land on the very node that it left. It is a preference and no requirement, as a pod keeps its affinity for
life: clouds give the machine that comes in a node's place the node's name, and a pod that fits nowhere else would
wait beside it for ever.
"""

from __future__ import annotations

import copy

from gracepoint_operator.webhooks.training_jobs import Json

_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
#: The most that the API server takes.
_WEIGHT = 100
#: Maintenance is announced for whole node pools at once: every pod would carry thousands of names, to no effect.
MOST_NODES = 500


def avoid_nodes(pod: Json, nodes: frozenset[str]) -> Json:
    """The pod with a preferred node affinity against ``nodes`` (names of Node objects), beside its own ones.

    Against ``MOST_NODES`` of them, where there are more.
    """
    made = copy.deepcopy(pod)
    if not nodes:
        return made
    spec = made.setdefault("spec", {})
    affinity = spec["affinity"] = spec.get("affinity") or {}
    node_affinity = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    preferred: list[Json] = node_affinity.get(_PREFERRED) or []
    present = [field for term in preferred for field in term["preference"].get("matchFields") or []]
    # By the object's name, not the hostname label, which some clouds set to something else. The API server
    # takes one name a requirement.
    requirements = [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)[:MOST_NODES]
    ]
    if new := [requirement for requirement in requirements if requirement not in present]:
        preferred = [*preferred, {"weight": _WEIGHT, "preference": {"matchFields": new}}]
    node_affinity[_PREFERRED] = preferred
    return made
