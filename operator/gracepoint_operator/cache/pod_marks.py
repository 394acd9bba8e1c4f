"""Which marks of the catalogue concern which pods of a gang. Reads the index; has no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gracepoint_operator.cache.indexes.signal_index import SignalIndex
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.signals import Mark
from gracepoint_operator.workloads import Job

_Place = Callable[[str], tuple[Kind, str, str] | None]


def marks_of_pods(
    index: SignalIndex,
    place: _Place,
    queued_as: Sequence[str],
    pods: Sequence[Pod],
    nodes: Mapping[str, Node],
    jobs: Mapping[str, Job],
) -> dict[str, tuple[Mark, ...]]:
    """Returns the marks on everything that each pod depends on, by its UID. Pods without marks are left out.

    Args:
        index: The marks of all objects.
        place: Returns kind, namespace and name of the object with a UID.
        queued_as: UID of the workload, and of what controls it.
        pods: Its pods.
        nodes: Their nodes, by name.
        jobs: Their Jobs, by name.
    """
    marked = index.marked
    if queued_as[0] in marked or index.attached_to(queued_as):
        concerned = list(pods)
    else:
        marked_nodes = {name for name, node in nodes.items() if node.uid in marked}
        marked_nodes |= {name for name in {pod.node for pod in pods} if index.attached_to([name])}
        marked_jobs = {name for name, job in jobs.items() if job.uid in marked}
        concerned = [
            pod
            for pod in pods
            if pod.uid in marked or pod.node in marked_nodes or (marked_jobs and pod.job_name in marked_jobs)
        ]
    found = {
        pod.uid: _concerning(index, place, queued_as, pod, nodes.get(pod.node), jobs.get(pod.job_name))
        for pod in concerned
    }
    return {uid: marks for uid, marks in found.items() if marks}


def _concerning(
    index: SignalIndex, place: _Place, queued_as: Sequence[str], pod: Pod, node: Node | None, job: Job | None
) -> tuple[Mark, ...]:
    attached = index.attached_to([pod.node, *queued_as])
    # Only objects in the pod's namespace or in none, because anybody may write any owner.
    attached = {uid for uid in attached if (where := place(uid)) is None or where[1] in ("", pod.namespace)}
    uids = [pod.uid, pod.workload_uid, *sorted(attached)]
    uids += [] if node is None else [node.uid]
    uids += [] if job is None or job.uid == pod.workload_uid else [job.uid]
    return index.on(uids)
