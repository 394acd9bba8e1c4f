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
from gracepoint_operator.kube.objects import HeldUp, Pod, format_time
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import Preemption, SignalKind
from gracepoint_operator.signals import Mark
from gracepoint_operator.workloads import BY_NAME, Workload, WorkloadIdentity

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
#: A process has left by an exit code of the library, and no preemption says why.
REASON_PROCESS_LEFT = "ProcessLeft"
#: A container has ended in a way of which nobody can say that it was the program's, and which counts nevertheless.
REASON_CONTAINER_LOST = "ContainerLost"
#: Reasons in the state of a container (pkg/kubelet of Kubernetes, containerd), and what they mean. A rule of a Job sees
#: the exit code alone.
_LOST = {
    "ContainerStatusUnknown": "its pod was deleted before it was started, or its node lost it",
    "ContainerCannotRun": "the runtime could not start it",
    "StartError": "the runtime could not start it",
    "Unknown": "its node was reset",
}
#: Of processes that leave by the same code within so many seconds, the first one alone is named.
_TOGETHER_S = 60


class EndedPods:
    """Says why pods have ended for anything but an error of their program, by an Event on their workload.

    A kubelet that evicts a pod or shuts down, and the garbage collector of pods, mark a pod in the moment in which it
    has ended. Then it is too late for a preemption: what follows is the restart of the gang. And a process may leave by
    an exit code of the library although no preemption is recorded: it caught a SIGTERM, or did not get into the job.

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
        """Says soon why a pod has ended, if it tells and no preemption of its gang is about it."""
        workload = self._cache.objects.workloads.get(pod.workload_uid)
        if not pod.finished or workload is None or not pod.policy:
            return
        mark = next((mark for mark in marks if mark.row.kind is SignalKind.DISRUPTION_TARGET), None)
        preemptions = self._cache.preemptions.of_workload(workload.uid)
        where = f" on {pod.node}" if pod.node else ""
        if mark is not None:
            if not any(pod.name in preemption.spec.pods and preemption.includes(pod) for preemption in preemptions):
                message = f"the pod {pod.name}{where} was ended from outside: {mark.text}; the restart does not count"
                self._say(workload, pod.uid, Note(REASON_POD_DISRUPTED, message))
        elif pod.holdup is not None and pod.holdup.at is HeldUp.ENDED and not pod.helps:
            code, reason = pod.holdup.exit_code, pod.holdup.reason
            episode = f"{pod.restart_attempt} {code} {(pod.ended_at or pod.created_at) // _TOGETHER_S:.0f}"
            if (cause := self._why_it_left(pod, code, workload, preemptions)) is not None:
                message = f"the process of the pod {pod.name}{where} left with exit code {code}: {cause}"
                self._say(workload, episode, Note(REASON_PROCESS_LEFT, f"{message}; this does not count"))
            elif reason in _LOST:
                message = f"the container of the pod {pod.name}{where} has exit code {code} ({reason}): {_LOST[reason]}"
                counts = "this counts, as a Job cannot tell it from an error of the program"
                self._say(workload, episode, Note(REASON_CONTAINER_LOST, f"{message}; {counts}", warning=True))

    def _why_it_left(
        self, pod: Pod, code: int | None, workload: Workload, preemptions: Iterable[PreemptionRecord]
    ) -> str | None:
        """What the exit code of a process means. None: it is its program's, or a preemption has it."""
        policy = self._cache.policies.get((workload.namespace, workload.policy))
        if policy is None or code is None:
            return None
        spec = policy.spec
        if code == spec.not_joined_exit_code:
            return "it did not get into the job, or another process was lost"
        # The end of one in progress may come to this replica after the end of the pod.
        its_own = [preemption for preemption in preemptions if preemption.includes(pod)]
        if any(item.leaves or (item.asks_to_leave and not item.phase.ended) for item in its_own):
            return None
        meanings = {
            spec.after_save.saved_exit_code: "it has saved",
            spec.after_save.unsaved_exit_code: "it was to save, and has not in time",
        }
        return meanings.get(code)

    def _say(self, workload: Workload, episode: str, note: Note) -> None:
        key = (workload.namespace, f"{workload.uid} {episode}")
        self._notes.setdefault(key, (workload, episode, note))
        self._write_queue.touch(key)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        if (entry := self._notes.pop(key, None)) is not None:
            workload, uid, note = entry
            await self._events.post_on(workload, note, uid)
