"""Which marks tell no time of their own, and when they were first seen. Reads the cache's parts; has no state."""

from __future__ import annotations

from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.cache.indexes.gang_objects import GangObjects
from gracepoint_operator.cache.indexes.signal_index import SignalIndex


def undated_since(
    index: SignalIndex, objects: GangObjects, first_seen: FirstSeen, *, of_pods: bool
) -> dict[str, float]:
    """When marks were first seen. Only for marks whose time the API server does not tell.

    Args:
        index: The marks of all objects.
        objects: The objects of the gangs.
        first_seen: When each mark was first seen.
        of_pods: Only for marks that concern a pod.
    """
    undated = {mark.id for mark in index.on(index.marked) if not (mark.is_exact or mark.row.limit)}
    if not (undated and of_pods):
        return {mark: at for mark, at in first_seen.since(index.marked).items() if mark in undated}
    nodes, gangs = objects.nodes_with_pods(), objects.workloads_with_pods()
    about = {objects.nodes[name].uid for name in nodes & objects.nodes.keys()}
    about |= gangs | {job.uid for gang in gangs for job in objects.jobs_of(gang)}
    about |= index.attached_to([*nodes, *(uid for gang in gangs for uid in objects.workloads[gang].queued_as)])
    return {mark: at for mark, at in first_seen.since(about & index.marked).items() if mark in undated}
