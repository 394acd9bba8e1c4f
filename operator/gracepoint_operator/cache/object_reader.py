"""Reads objects of the API server into what the cache keeps of them.

An object of 20 kB becomes a record of some hundred bytes. It is read where it arrives: in the threads of
``KubeClient`` for lists, in the threads that watch for events. So the controller's event loop neither decodes nor holds
whole objects. A reader has no state but the catalogue, and any thread may use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.resource_versions import version_of
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.fields import LONGEST_NAME
from gracepoint_operator.kube.objects import Namespace, Node, Pod, read_namespace, read_node
from gracepoint_operator.model.devices import ClaimedDevices, DeviceTaints, read_claim, read_rule, read_slice
from gracepoint_operator.model.eviction_requests import EvictionAsked, read_eviction
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.read_errors import Unreadable, reading
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, PreemptionRequest
from gracepoint_operator.signals import Mark, On, Row
from gracepoint_operator.workloads import BY_PLACE, Job, Workload, WorkloadType, read_job, read_pod

#: What is read of an object. A text for objects that only matter because of what they belong to: the name of the node
#: of a NodeClaim, the UID of the owner of a Kueue workload.
Value = (Namespace | Node | Pod | Job | Workload | ClaimedDevices | DeviceTaints) | (
    CheckpointPolicy | ClusterCheckpointPolicy | PreemptionRecord | RequestRecord | EvictionAsked | str
)


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectReading:
    """What was read of one object.

    Attributes:
        version: Its resourceVersion. 0 if it is not a number.
        value: None if the object cannot be read.
        marks: The marks of the catalogue on it.
        unreadable_parts: The parts that could not be read.
        error: Why the object cannot be read. None if it can.
    """

    kind: kinds.Kind
    namespace: str
    name: str
    uid: str
    version: int
    value: Value | None
    marks: tuple[Mark, ...] = ()
    unreadable_parts: tuple[str, ...] = ()
    error: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)


class CacheReader:
    """Reads objects.

    Args:
        rows: The disruption catalogue, in the order in which its rows are tried.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {on: tuple(row for row in rows if row.match.kind is on) for on in On}
        self._marked = {
            kinds.NODES: On.NODE,
            kinds.NODE_CLAIMS: On.NODE_CLAIM,
            kinds.KUEUE_WORKLOADS: On.WORKLOAD,
            kinds.PODS: On.POD,
            kinds.JOBS: On.JOB,
            **{place: On(known.name) for place, known in BY_PLACE.items()},
        }
        self._values: dict[kinds.Kind, Callable[[Mapping[str, Any]], Value]] = {
            kinds.NAMESPACES: read_namespace,
            kinds.NODES: read_node,
            kinds.NODE_CLAIMS: _node_of_claim,
            kinds.KUEUE_WORKLOADS: _owner_of_kueue_workload,
            kinds.EVICTIONS: read_eviction,
            kinds.RESOURCE_CLAIMS: read_claim,
            kinds.PODS: read_pod,
            kinds.JOBS: read_job,
            **{place: _reader_of(known) for place, known in BY_PLACE.items()},
            kinds.CLUSTER_POLICIES: ClusterCheckpointPolicy.of,
            kinds.POLICIES: CheckpointPolicy.of,
            kinds.PREEMPTIONS: _read_preemption,
            kinds.REQUESTS: RequestRecord.of,
        }
        self._with_taints = {kinds.RESOURCE_SLICES: read_slice, kinds.DEVICE_TAINT_RULES: read_rule}

    @property
    def readable(self) -> Iterable[kinds.Kind]:
        """The kinds that can be read."""
        return (*self._values, *self._with_taints)

    def read(self, kind: kinds.Kind, body: Mapping[str, Any]) -> ObjectReading | None:
        """Reads an object. Returns None if it has no name under which it could be reported.

        Args:
            kind: One of the kinds that are watched (``resync.SELECTORS``).
            body: The object as the API server returned it.
        """
        try:
            with reading("metadata"):
                meta = body["metadata"]
                uid, name, namespace = (meta.get(field, "") for field in ("uid", "name", "namespace"))
                if not (uid and name and all(map(_is_short, (uid, name, namespace)))):
                    return None
                version = version_of(meta)
        except Unreadable:
            return None
        unreadable_parts: dict[str, None] = {}
        try:
            with reading(f"{namespace}/{name}".removeprefix("/")):
                value = self._value(kind, body, unreadable_parts)
                on = self._marked.get(kind)
                marks = () if on is None else signals.marks(self._rows[on], on, body, unreadable_parts)
        except Unreadable as error:
            return ObjectReading(kind, namespace, name, uid, version, None, error=str(error))
        return ObjectReading(kind, namespace, name, uid, version, value, marks, tuple(unreadable_parts))

    def _value(self, kind: kinds.Kind, body: Mapping[str, Any], unreadable_parts: dict[str, None]) -> Value:
        if (read_taints := self._with_taints.get(kind)) is None:
            return self._values[kind](body)
        of_device = functools.partial(
            signals.marks, self._rows[On.DEVICE], On.DEVICE, unreadable_parts=unreadable_parts
        )
        return read_taints(body, of_device)


def _is_short(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_NAME


def _reader_of(known: WorkloadType) -> Callable[[Mapping[str, Any]], Workload]:
    return known.read


def _node_of_claim(body: Mapping[str, Any]) -> str:
    return str((body.get("status") or {}).get("nodeName") or "")


def _owner_of_kueue_workload(body: Mapping[str, Any]) -> str:
    # A workload of ours, or what made it (``Workload.queued_as``).
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners), "")


def _read_preemption(body: Mapping[str, Any]) -> PreemptionRecord | RequestRecord:
    if PreemptionRequest.is_one(body["spec"]):
        return RequestRecord.of(body)
    return PreemptionRecord.of(body)
