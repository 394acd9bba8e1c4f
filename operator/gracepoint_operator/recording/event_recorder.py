"""Posts the Events that show a preemption to people: on its workload, and on the Preemption itself.

The tasks of the preemption writer call it, after the write that changed the record. The name of an Event is a digest
of its content, so that an Event which is posted again, by the other replica or after a restart, is the same Event. The
name begins with the Event's place in the story, because kubectl shows Events of this API in the order of their names.
An Event that cannot be posted is logged and not tried again, because it is not state.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

from gracepoint.wire import names
from gracepoint.wire.messages import one_line
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.preemption_status import EVENT_CONTROLLER, STORY, Note
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod, format_time
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import Preemption, SignalKind
from gracepoint_operator.signals import Mark
from gracepoint_operator.workloads import BY_NAME, WorkloadIdentity

logger = logging.getLogger(__name__)

#: The API server's limit.
_NOTE_BYTES = 1024


class EventRecorder:
    """Posts Events.

    Args:
        api: The API server.
        clock: Seconds since the epoch.
        replica: This replica's name.

    Attributes:
        replica: This replica's name.
    """

    def __init__(self, api: KubeClient, clock: Callable[[], float], replica: str) -> None:
        self._api = api
        self._clock = clock
        self.replica = replica

    async def post(self, preemption: PreemptionRecord, uid: str, note: Note) -> None:
        """Posts one Event on the workload and one on the Preemption.

        Args:
            preemption: The preemption.
            uid: The UID of the Preemption object.
            note: The reason and message.
        """
        workload = preemption.spec.workload
        record = (f"{names.GROUP}/{names.API_VERSION}", Preemption.kind_name, preemption.name, uid)
        api_version = BY_NAME[workload.kind].kind.api_version
        for regarding in ((api_version, workload.kind, workload.name, workload.uid), record):
            try:
                await self._api.create(objects.EVENTS, preemption.namespace, self._event(preemption, note, *regarding))
            except client.AlreadyExists:
                continue
            except client.KubeError as error:
                logger.warning("could not post an Event", extra=about(reason=note.reason, error=str(error)))

    async def post_on(self, workload: WorkloadIdentity, note: Note, episode: str) -> None:
        """Posts one Event on a workload alone.

        Args:
            workload: The workload.
            note: The reason and message.
            episode: Together with the reason, it says which Event is the same, whatever the message.
        """
        api_version = BY_NAME[workload.kind].kind.api_version
        fingerprint = hashlib.sha256("\n".join((workload.uid, note.reason, episode)).encode()).hexdigest()[:12]
        regarding = {
            "apiVersion": api_version,
            "kind": workload.kind,
            "namespace": workload.namespace,
            "name": workload.name,
            "uid": workload.uid,
        }
        name = f"{workload.name}.{note.reason.lower()}-{fingerprint}"
        try:
            await self._api.create(
                objects.EVENTS, workload.namespace, self._body(workload.namespace, name, note, regarding)
            )
        except client.AlreadyExists:
            return
        except client.KubeError as error:
            logger.warning("could not post an Event", extra=about(reason=note.reason, error=str(error)))

    def _event(
        self, preemption: PreemptionRecord, note: Note, api_version: str, kind: str, name: str, uid: str
    ) -> JsonObject:
        fingerprint = hashlib.sha256("\n".join((kind, uid, note.reason, note.message)).encode()).hexdigest()[:12]
        place = STORY.index(note.reason)
        regarding = {
            "apiVersion": api_version,
            "kind": kind,
            "namespace": preemption.namespace,
            "name": name,
            "uid": uid,
        }
        return self._body(preemption.namespace, f"{preemption.name}.{place:02}-{fingerprint}", note, regarding)

    def _body(self, namespace: str, name: str, note: Note, regarding: JsonObject) -> JsonObject:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"namespace": namespace, "name": name},
            "eventTime": format_time(self._clock()),
            "reportingController": EVENT_CONTROLLER,
            "reportingInstance": self.replica[:128],
            "action": note.reason,
            "reason": note.reason,
            "note": one_line(note.message).encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "type": "Warning" if note.warning else "Normal",
            "regarding": regarding,
        }


#: Why a pod has ended, if it was neither its program nor anything that the gang could be told of before.
REASON_POD_DISRUPTED = "PodDisrupted"


class EndedPods:
    """Says which pods were ended from outside without notice, by an Event on their workload.

    A kubelet that evicts a pod or shuts down, and the garbage collector of pods, mark a pod in the moment in which it
    has ended. Then it is too late for a preemption: what follows is the restart of the gang.

    Args:
        cache: What is known of the cluster.
        events: Posts the Events.
        metrics: Counts failures.
        interval_s: Seconds between two writes about one pod.
    """

    def __init__(self, cache: ClusterCache, events: EventRecorder, metrics: Metrics, interval_s: float) -> None:
        self._cache = cache
        self._events = events
        self._notes: dict[Key, tuple[WorkloadIdentity, str, Note]] = {}
        self._write_queue = WriteQueue("end of a pod", self._write, metrics, interval_s)

    def see(self, pod: Pod, marks: Iterable[Mark]) -> None:
        """Says soon why a pod has ended, if its marks tell and no preemption of its gang is about it."""
        mark = next((mark for mark in marks if mark.row.kind is SignalKind.DISRUPTION_TARGET), None)
        workload = self._cache.objects.workloads.get(pod.workload_uid)
        if not pod.finished or mark is None or workload is None or not pod.policy:
            return
        preemptions = self._cache.preemptions.of_workload(workload.uid)
        if any(pod.name in preemption.spec.pods and preemption.includes(pod) for preemption in preemptions):
            return
        where = f" on {pod.node}" if pod.node else ""
        message = f"the pod {pod.name}{where} was ended from outside: {mark.text}; the restart does not count"
        key = (pod.namespace, pod.uid)
        self._notes[key] = (workload, pod.uid, Note(REASON_POD_DISRUPTED, message))
        self._write_queue.touch(key)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        if (known := self._notes.pop(key, None)) is not None:
            workload, uid, note = known
            await self._events.post_on(workload, note, uid)
