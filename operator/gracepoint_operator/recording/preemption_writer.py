"""Writes Preemptions and their Events to the API server.

Runs as tasks of a write queue on the controller's event loop. Each write first puts this replica's own entry into the
object. Then it joins what it reads there with what is known here (``preemption.joined_status`` only adds), and writes
the result under the version that was read. So no replica undoes what another wrote. The replica whose write changes a
phase posts the Event, once. The last replica to write has seen the entries of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint.wire import names
from gracepoint.wire.messages import Phase
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.preemption_spec import DEADLINE_TOLERANCE_S
from gracepoint_operator.decisions.statuses import event_notes, preemption_status
from gracepoint_operator.decisions.statuses.event_notes import Note
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.model.preemption import PreemptionRecord, joined_status
from gracepoint_operator.observability.logs import about, decided
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording import outcome_metrics
from gracepoint_operator.recording.acknowledgements import AcknowledgementLog
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policies.policy_writer import PolicyWriter
from gracepoint_operator.resources import Preemption, Replica
from gracepoint_operator.workloads import BY_NAME

log = logging.getLogger(__name__)

_API_VERSION = f"{names.GROUP}/{names.API_VERSION}"


class PreemptionWriter:
    """Keeps the records in the API up to date.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        acknowledgements: What only this replica knows.
        policy_writer: Is told of what changes a policy's status.
        metrics: Counts phases and failures.
        clock: Seconds since the epoch.
        replica: This replica's name, the owner of its entries.
        interval_s: Seconds between two writes of one Preemption.

    Attributes:
        made: Namespaces and names of the Preemptions that this replica created.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        acknowledgements: AcknowledgementLog,
        policy_writer: PolicyWriter,
        metrics: Metrics,
        clock: Callable[[], float],
        replica: str,
        interval_s: float,
    ) -> None:
        self._api = api
        self._cache = cache
        self._acknowledgements = acknowledgements
        self._metrics = metrics
        outcome_metrics.begin(metrics)
        self._replica = replica
        self.made: set[Key] = set()
        self._policy_writer = policy_writer
        self._events = EventRecorder(api, clock, replica)
        self._write_queue = WriteQueue("preemption", self._write, metrics, interval_s, self._refused)
        self._unrecorded: dict[Key, str] = {}  # name of the policy of each that the API server refuses

    def touch(self, epoch: PreemptionRecord, *, urgent: bool = False, after_s: float = 0.0) -> None:
        """Writes the preemption soon.

        Args:
            epoch: The preemption.
            urgent: True if it began or ended just now. Then the write does not wait for the pause to end.
            after_s: How many seconds the first write waits.
        """
        if not epoch.is_restored:  # whoever restores it may also restore its status
            self._write_queue.touch(epoch.key, urgent=urgent, after_s=after_s)

    async def settled(self, epoch: PreemptionRecord, timeout_s: float) -> None:
        """Waits until what is known of the preemption now is written, for at most ``timeout_s`` seconds."""
        await self._write_queue.settled(epoch.key, timeout_s)

    def follow(self, current: PreemptionRecord) -> None:
        """Handles a record that any replica wrote: it is written again if it lacks what is known here."""
        if current.status.phase is None:
            return  # its creator is about to write the status; if it died, the next sweep does
        joined = self._joined(current)
        if joined is None:
            return
        if joined.spec != current.spec or self._own_entry(current) or self._changes(joined, current):
            self._write_queue.touch(current.key)

    def forget(self, key: Key) -> None:
        """Forgets a Preemption that was deleted."""
        self.made.discard(key)
        self._refused(key, None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _refused(self, key: Key, why: str | None) -> None:
        """Notes why the API server refuses to write a preemption. None: it is not refused any more."""
        epoch = self._cache.preemptions.epochs.get(key)
        if why is None:
            policy = self._unrecorded.pop(key, None)
        elif epoch is None:
            return  # forgotten meanwhile
        else:
            policy = self._unrecorded[key] = epoch.spec.policy.name
        self._metrics.unrecorded.set(len(self._unrecorded))
        if policy is not None:
            self._policy_writer.recording((key[0], policy), key[1], why)

    async def _write(self, key: Key) -> None:
        namespace, name = key
        epoch = self._cache.preemptions.epochs.get(key)
        if epoch is None:
            return
        try:
            body = await self._made(epoch)
            found = PreemptionRecord.of(body)
            if epoch.is_of_another_life(found):
                log.error(
                    "a record of another life of the gang has this name, what was known under it is dropped",
                    extra=about(preemption=name, attempt=epoch.spec.restart_attempt),
                )
                self._acknowledgements.forget(key)
                self._cache.preemptions.put(found)
            joined = self._joined(found)
            if joined is not None and joined.spec != found.spec:
                body = await self._api.merge(kinds.PREEMPTIONS, namespace, name, {"spec": joined.spec.to_json()})
                await self._announce_move(found, PreemptionRecord.of(body), str(body["metadata"]["uid"]))
            entry = self._own_entry(found)
            if entry is not None:
                body = await self._apply(key, entry)
        except client.NotFound as error:
            if epoch.created_at is not None:
                return  # it was deleted; the watch will bring that
            if await self._has_namespace(namespace):  # so the kind is not served just now
                raise client.Unavailable(str(error)) from error
            log.info("a record was never made, and is dropped with its namespace", extra=about(preemption=name))
            self._acknowledgements.forget(key)
            self._cache.preemptions.drop_unmade(key)
            return
        current = PreemptionRecord.of(body)
        joined = self._joined(current)
        if joined is None:
            return
        changes = self._changes(joined, current)
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            written = PreemptionRecord.of(await self._api.merge_status(kinds.PREEMPTIONS, namespace, name, patch))
            self._cache.preemptions.join(written)
            await self._announce(current, written, str(body["metadata"]["uid"]))

    async def _made(self, epoch: PreemptionRecord) -> client.JsonObject:
        """The object as the API has it. It is created if it does not exist. 409: the other replica was first."""
        if epoch.created_at is not None:
            return await self._api.get(kinds.PREEMPTIONS, epoch.namespace, epoch.name)
        workload = epoch.workload
        body = {
            "apiVersion": _API_VERSION,
            "kind": Preemption.kind_name,
            "metadata": {
                "namespace": epoch.namespace,
                "name": epoch.name,
                "labels": {
                    names.LABEL_POLICY: epoch.spec.policy.name,
                    **BY_NAME[workload.kind].record_labels(workload.name, workload.uid),
                },
            },
            "spec": epoch.spec.to_json(),
        }
        try:
            made = await self._api.create(kinds.PREEMPTIONS, epoch.namespace, body)
        except client.AlreadyExists:
            return await self._api.get(kinds.PREEMPTIONS, epoch.namespace, epoch.name)
        self.made.add(epoch.key)
        return made

    async def _has_namespace(self, name: str) -> bool:
        try:
            await self._api.get(kinds.NAMESPACES, None, name)
        except client.NotFound:
            return False
        return True

    def _joined(self, current: PreemptionRecord) -> PreemptionRecord | None:
        """The API's record joined with what is known here. None if it was forgotten here."""
        known = self._cache.preemptions.epochs.get(current.key)
        return None if known is None else known.joined(current)

    def _changes(self, joined: PreemptionRecord, current: PreemptionRecord) -> client.JsonObject:
        """The fields of the status that must be written."""
        wanted = joined.status
        if wanted.acknowledgements is None:  # its creator died before the first status
            wanted = joined_status(
                preemption_status.noticed(len(self._cache.objects.pods_at(joined)), joined.spec), wanted
            )
        observed_at = joined.spec.observed_at.timestamp()
        first_at = self._acknowledgements.first_acknowledged_at(joined.key)
        if first_at is not None:
            wanted = preemption_status.with_stage(wanted, "firstAck", observed_at, first_at)
        names = [pod.name for pod in self._cache.objects.pods_at(joined)] if preemption_status.is_told(joined) else []
        wanted = preemption_status.acknowledged(wanted, names, observed_at)
        if current.generation:
            wanted = wanted.model_copy(update={"observed_generation": current.generation})
        return wanted.changes_since(current.status)

    def _own_entry(self, current: PreemptionRecord) -> Replica | None:
        """This replica's entry, if the record has another one or none."""
        own = self._acknowledgements.replica(current.key, self._replica)
        if own.told == 0 and own.acknowledged == 0:
            return None
        entry = preemption_status.own_entry(current.status, own)
        return None if entry in (current.status.replicas or ()) else entry

    async def _apply(self, key: Key, entry: Replica) -> client.JsonObject:
        body = {
            "apiVersion": _API_VERSION,
            "kind": Preemption.kind_name,
            "metadata": {"namespace": key[0], "name": key[1]},
            "status": {"replicas": [entry.to_json()]},
        }
        manager = f"gracepoint-{self._replica}"[:128]
        return await self._api.apply_status(kinds.PREEMPTIONS, key[0], key[1], body, manager=manager)

    async def _announce_move(self, before: PreemptionRecord, after: PreemptionRecord, uid: str) -> None:
        moved_s = abs((after.spec.deadline - before.spec.deadline).total_seconds())
        if moved_s > DEADLINE_TOLERANCE_S and before.status.phase is not None:
            await self._events.post(after, uid, event_notes.note_of_move(after))

    def _pods_live(self, epoch: PreemptionRecord) -> bool:
        """True if a pod that the signals were about still runs."""
        about_it = set(epoch.spec.pods)
        return any(
            pod.name in about_it and pod.namespace == epoch.namespace and epoch.includes(pod)
            for pod in self._cache.objects.pods_of(epoch.spec.workload.uid)
            if not pod.finished and pod.deletion_at is None
        )

    async def _announce(self, before: PreemptionRecord, after: PreemptionRecord, uid: str) -> None:
        notes: list[Note | None] = []
        if before.status.phase is None and after.phase is not Phase.NOTICED:
            notes.append(event_notes.note_of_phase(after, Phase.NOTICED))
        if before.phase.rank < Phase.AGREED.rank < after.phase.rank and after.status.ordinal is not None:
            notes.append(event_notes.note_of_phase(after, Phase.AGREED))
        outcome_metrics.count_receipts(self._metrics, before, after)
        if before.status.phase is not after.status.phase:
            outcome_metrics.count(self._metrics, before, after, pods_live=self._pods_live(after))
            notes.append(event_notes.note_of_phase(after, after.phase))
            log.info(
                "preemption moved on",
                extra=decided(preemption=after.name, phase=after.phase, why=after.status.message),
            )
            self._policy_writer.touch(after.namespace, after.spec.policy.name)
        if before.status.phase is None and not after.spec.exits:
            notes.append(event_notes.note_of_breaker(after))
        if before.status.restored_step is None and after.status.restored_step is not None:
            notes.append(event_notes.note_of_resumption(after))
        for note in notes:
            if note is not None:
                await self._events.post(after, uid, note)
