"""Keeping new pods off nodes that are going away. Pure.

A label or condition does not keep the scheduler away, and a taint may be tolerated: without this a restarted
job can land on the very node that it left.
"""

from __future__ import annotations

import copy

from gracepoint_operator.admission.members import Json


def avoid_nodes(pod: Json, nodes: frozenset[str]) -> Json:
    """The pod with a required node affinity against ``nodes`` (names of Node objects).

    Terms of a node selector are alternatives, so each is narrowed. One that is empty matches no node, and
    stays as it is: a requirement in it would make it match.
    """
    made = copy.deepcopy(pod)
    if not nodes:
        return made
    # By the object's name, not the hostname label, which some clouds set to something else. The API server
    # takes one name a requirement.
    requirements = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    spec = made.setdefault("spec", {})
    affinity = spec["affinity"] = spec.get("affinity") or {}
    node_affinity = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    selector = node_affinity.get(key)
    if selector is None:
        node_affinity[key] = {"nodeSelectorTerms": [{"matchFields": requirements}]}
        return made
    for term in selector["nodeSelectorTerms"]:
        if term.get("matchExpressions") or term.get("matchFields"):
            present: list[Json] = term.get("matchFields") or []
            term["matchFields"] = present + [new for new in requirements if new not in present]
    return made
