"""Keeps new pods off nodes that are going away. Pure.

The scheduler ignores labels and conditions, and pods may tolerate a taint. So without this module, a restarted job can
be scheduled to the node that it left. The affinity is a preference, not a requirement, because a pod keeps its affinity
for life. Clouds give the machine that replaces a node the same node name. With a requirement, a pod that fits nowhere
else would stay pending for ever.
"""

from __future__ import annotations

import copy

from gracepoint_operator.webhooks.training_jobs import Json

_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
#: The maximum that the API server accepts.
_WEIGHT = 100
#: Limit of names in a pod. If maintenance is announced for whole node pools, thousands of names would have no effect.
MOST_NODES = 500


def avoid_nodes(pod: Json, nodes: frozenset[str]) -> Json:
    """Returns the pod with a preferred node affinity against ``nodes``, the names of Node objects.

    The pod's own affinities stay. At most ``MOST_NODES`` of the nodes are used.
    """
    made = copy.deepcopy(pod)
    if not nodes:
        return made
    spec = made.setdefault("spec", {})
    affinity = spec["affinity"] = spec.get("affinity") or {}
    node_affinity = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    preferred: list[Json] = node_affinity.get(_PREFERRED) or []
    present = [field for term in preferred for field in term["preference"].get("matchFields") or []]
    # By the name of the object, not by the hostname label, which has another value in some clouds. The API server
    # accepts one name in each requirement.
    requirements = [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)[:MOST_NODES]
    ]
    if new := [requirement for requirement in requirements if requirement not in present]:
        preferred = [*preferred, {"weight": _WEIGHT, "preference": {"matchFields": new}}]
    node_affinity[_PREFERRED] = preferred
    return made
