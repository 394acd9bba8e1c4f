"""Asks Kueue for other nodes than those that a gang leaves.

Kueue's topology-aware scheduling assigns nodes to a Workload when it is admitted, and pins each pod to its node, also
pods that are made anew. An affinity cannot keep them away. So the operator tells Kueue, in Kueue's own Workload:

* When a gang has saved for a preemption and leaves, the nodes that the preemption names go into
  ``status.unhealthyNodes``. Kueue then assigns another node, or evicts the Workload if there is none
  (TASFailedNodeReplacement, on since Kueue 0.14). It replaces one node at a time, so each node is named when the field
  is empty, and only once for each preemption: Kueue may choose the same node again, because it looks at taints and not
  at other signals.
* The operator takes these names out again: once the node is replaced or the Workload is evicted, or ``ANSWERED_S``
  later. Kueue cannot, because it writes by server-side apply, which leaves alone what another client has written. And
  a Workload in which a node is named is not looked after by Kueue, and gets no nodes when it is admitted again.
* If pods are pinned to such a node all the same and cannot be bound there for ``PINNED_S``, the operator evicts the
  Workload, once for each node and start of the gang. Kueue suspends the job, which is not counted as a restart, and
  assigns nodes anew. Kueue 0.17 and newer ends such pods itself.

Runs as tasks of a write queue on the controller's event loop. Both replicas may ask: the second one finds the field
filled, or the node replaced.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Kind, Pod, format_time, true_conditions
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord

log = logging.getLogger(__name__)

#: How long pods may be pinned to a node that is going away without being bound to it, in seconds.
PINNED_S = 30.0
#: How long Kueue has to replace a node, in seconds. It does so within two.
ANSWERED_S = 20.0
#: How long after the end of a preemption its nodes are still replaced, in seconds. Then the gang has started anew.
_LEAVES_S = 60.0
_HOSTNAME = "kubernetes.io/hostname"


@dataclasses.dataclass
class _Requests:
    """What was asked for a workload.

    Attributes:
        preemption: Name of the preemption for which nodes were named.
        nodes: These nodes.
        named_at: Since when nodes are named in the Workload, in seconds since the epoch. None: none is.
        start: The start of the gang for which the Workload was evicted: its latest preemption, and its restarts.
        evicted: The nodes for which it was.
        pinned: The nodes to which pods are pinned, by the UIDs of the pods that were read. It does not change.
    """

    preemption: str = ""
    nodes: set[str] = dataclasses.field(default_factory=set)
    named_at: float | None = None
    start: tuple[str, int] = ("", 0)
    evicted: set[str] = dataclasses.field(default_factory=set)
    pinned: dict[str, str] = dataclasses.field(default_factory=dict)


class KueueWriter:
    """Asks Kueue for other nodes.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Seconds between two writes of one Workload.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, metrics: Metrics, clock: Callable[[], float], interval_s: float
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._requests: dict[str, _Requests] = {}  # by the UID of the workload
        self._write_queue = WriteQueue("nodes of a Kueue workload", self._write, metrics, interval_s)
        self._workloads: dict[Key, str] = {}  # Kueue's Workload -> UID of the workload that it is about

    def look(self, gang: GangSnapshot) -> float | None:
        """Asks for other nodes soon if the gang needs them. Returns when to look again even if nothing changes."""
        leaving, waiting, now = self._leaving(gang), _waiting(gang), self._clock()
        named_at = self._requests.get(gang.workload_uid, _Requests()).named_at
        if not (leaving or waiting or named_at is not None):
            return None
        entries = self._cache.suspensions.queue_entries(gang.workload_uid)
        late_at = [pod.created_at + PINNED_S for pod in waiting]
        if leaving or named_at is not None or any(at <= now for at in late_at):
            for entry in entries:
                self._workloads[entry] = gang.workload_uid
                self._write_queue.touch(entry)
        times = late_at if named_at is None else [*late_at, named_at + ANSWERED_S]
        return min((at for at in times if at > now), default=None) if entries else None

    def forget(self, uid: str) -> None:
        """Forgets a workload."""
        self._requests.pop(uid, None)
        for entry in [entry for entry, of in self._workloads.items() if of == uid]:
            del self._workloads[entry]

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _leaving(self, gang: GangSnapshot) -> list[str]:
        """The nodes that the gang leaves, without those that were named before."""
        preemption = _latest(gang)
        if preemption is None or not preemption.leaves:
            return []
        ended_at = preemption.ended_at or 0.0
        if self._clock() > ended_at + _LEAVES_S and not any(map(preemption.includes, gang.pods)):
            return []
        requests = self._requests.get(gang.workload_uid, _Requests())
        named = requests.nodes if requests.preemption == preemption.name else ()
        return [node for node in preemption.spec.nodes if node not in named]

    async def _write(self, entry: Key) -> None:
        try:
            kind = await self._api.preferred(objects.KUEUE_WORKLOADS)
            body = await self._api.get(kind, *entry)
        except client.NotFound:
            return
        if (uid := self._workloads.get(entry)) is None:
            return
        gang = self._cache.gang(uid)
        requests = self._requests.setdefault(uid, _Requests())
        body = await self._take_back(kind, body, requests)
        if _is_admitted(body):
            if leaving := self._leaving(gang):
                await self._replace(kind, body, gang, leaving)
            elif waiting := _waiting(gang):
                await self._evict_if_pinned(kind, body, gang, waiting)

    async def _take_back(self, kind: Kind, body: JsonObject, requests: _Requests) -> JsonObject:
        """Takes out of the Workload which nodes are replaced, or will not be. Returns it as it is then."""
        named = _unhealthy(body)
        assigned = set(assigned_nodes(body)) if _is_admitted(body) else set()
        late = requests.named_at is not None and requests.named_at + ANSWERED_S <= self._clock()
        kept = [node for node in named if node in assigned and not (late and node in requests.nodes)]
        if kept != named:
            body = await self._change(kind, body, {"unhealthyNodes": [{"name": node} for node in kept] or None})
        if not kept:
            requests.named_at = None
        elif requests.named_at is None:
            requests.named_at = self._clock()
        return body

    async def _replace(self, kind: Kind, body: JsonObject, gang: GangSnapshot, leaving: Sequence[str]) -> None:
        """Names one of these nodes, once those that were named before are replaced."""
        preemption, requests = _latest(gang), self._requests[gang.workload_uid]
        if preemption is None:
            return
        if requests.preemption != preemption.name:
            requests.preemption, requests.nodes = preemption.name, set()
        if requests.named_at is not None:
            requests.nodes |= set(leaving) & set(_unhealthy(body))  # which the other replica has named
            return  # the watch brings the Workload again
        assigned = set(assigned_nodes(body))
        node = next((node for node in leaving if node in assigned), None)
        if node is not None:
            await self._change(kind, body, {"unhealthyNodes": [{"name": node}]})
            requests.named_at = self._clock()
            namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
            log.info("asked Kueue to replace a node", extra=about(namespace=namespace, workload=name, node=node))
        requests.nodes |= {other for other in leaving if other not in assigned or other == node}

    async def _evict_if_pinned(self, kind: Kind, body: JsonObject, gang: GangSnapshot, waiting: Sequence[Pod]) -> None:
        """Evicts the Workload if pods wait in vain for a node that goes away."""
        requests, preemption = self._requests[gang.workload_uid], _latest(gang)
        if gang.workload is None or not any(assigned_nodes(body)):
            return
        late = [pod for pod in waiting if pod.created_at + PINNED_S <= self._clock()]
        requests.pinned = {pod.uid: requests.pinned[pod.uid] for pod in late if pod.uid in requests.pinned}
        pins = {node for pod in late if (node := await self._pinned_to(pod, requests.pinned))}
        start = ("" if preemption is None else preemption.name, gang.workload.restarts)
        if requests.start != start:
            requests.start, requests.evicted = start, set()
        leaving = set() if preemption is None else set(preemption.spec.nodes)
        going = sorted((pins & (self._cache.objects.disrupted_nodes | leaving)) - requests.evicted)
        if not going:
            return
        condition = {
            "type": "Evicted",
            "status": "True",
            # Kueue's own reason, after which it puts the Workload into the queue again at once.
            "reason": "NodeFailures",
            "message": f"Gracepoint: pods are pinned to {', '.join(going[:10])}, which is going away",
            "lastTransitionTime": format_time(self._clock())[:19] + "Z",
        }
        others = [item for item in body["status"].get("conditions") or () if item.get("type") != "Evicted"]
        await self._change(kind, body, {"conditions": [*others, condition], "unhealthyNodes": None})
        requests.evicted |= set(going)
        requests.named_at = None
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        log.warning(
            "evicted a workload of Kueue, as its pods are pinned to nodes that are going away",
            extra=about(namespace=namespace, workload=name, nodes=", ".join(going)),
        )

    async def _change(self, kind: Kind, body: JsonObject, status: JsonObject) -> JsonObject:
        """Changes the status of this version of a Workload. Returns it as it is then."""
        meta = body["metadata"]
        change = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        return await self._api.merge_status(kind, meta["namespace"], meta["name"], change)

    async def _pinned_to(self, pod: Pod, node_by_pod: dict[str, str]) -> str:
        """The node to which a pod is pinned. Empty if it is pinned to none, or gone. Each pod is read once."""
        if (node := node_by_pod.get(pod.uid)) is not None:
            return node
        try:
            spec = (await self._api.get(objects.PODS, pod.namespace, pod.name)).get("spec") or {}
        except client.NotFound:
            return ""
        node = "" if spec.get("nodeName") else str((spec.get("nodeSelector") or {}).get(_HOSTNAME) or "")
        if not spec.get("schedulingGates"):  # Kueue pins a pod before it takes the gate away
            node_by_pod[pod.uid] = node
        return node


def _waiting(gang: GangSnapshot) -> list[Pod]:
    """The pods without a node."""
    return [pod for pod in gang.processes if not (pod.node or pod.finished or pod.deletion_at is not None)]


def _is_admitted(body: JsonObject) -> bool:
    conditions = true_conditions(body.get("status") or {})
    return "Admitted" in conditions and "Evicted" not in conditions


def _unhealthy(body: JsonObject) -> list[str]:
    """The nodes that Kueue is asked to replace."""
    return [str(item["name"]) for item in (body.get("status") or {}).get("unhealthyNodes") or ()]


def assigned_nodes(body: JsonObject) -> Iterator[str]:
    """Yields the nodes that topology-aware scheduling has assigned to a Workload of Kueue, of any of its versions."""
    for assigned in (body["status"].get("admission") or {}).get("podSetAssignments") or ():
        topology = assigned.get("topologyAssignment") or {}
        if (topology.get("levels") or [""])[-1] != _HOSTNAME:
            continue
        for domain in topology.get("domains") or ():  # v1beta1
            yield str(domain["values"][-1])
        for part in topology.get("slices") or ():  # v1beta2
            values = part["valuesPerLevel"][-1]
            if "universal" in values:
                yield str(values["universal"])
                continue
            each = values["individual"]
            for root in each["roots"]:
                yield f"{each.get('prefix') or ''}{root}{each.get('suffix') or ''}"


def _latest(gang: GangSnapshot) -> PreemptionRecord | None:
    return next((preemption for preemption in reversed(gang.preemptions) if not preemption.is_rehearsal), None)
