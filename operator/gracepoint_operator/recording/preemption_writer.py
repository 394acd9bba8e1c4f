"""Writes Preemptions and their Events to the API server, and the answers to requests. Counts outcomes in the metrics.

Runs as tasks of a write queue on the controller's event loop. Each write first puts this replica's own entry into the
object. Then it joins what it reads there with what is known here (``preemption_record.joined_status`` only adds), and
writes the result under the version that was read. So no replica undoes what another wrote. The replica whose write
changes a phase posts the Event, once. The last replica to write has seen the entries of all.

``AcknowledgementLog`` has what only this replica knows of its notices: when it notified each pod, and which pods
acknowledged to it. It is kept in the form in which it is written, because a gang of thousands of pods has an event for
each of them. ``channel`` fills it. The event loop owns it; there are no locks.

After each write of the record, all replicas look at all pods of the gang. So while receipts of thousands of pods come
in, the entry that is written is up to some seconds old (``AcknowledgementLog.waits_s``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Iterable, Sequence

from gracepoint.wire import names
from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import decide, preemption_status
from gracepoint_operator.decisions.decide import Answer
from gracepoint_operator.decisions.effective_signals import DEADLINE_TOLERANCE_S
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about, decided
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import (
    EndReason,
    Places,
    PreemptionRecord,
    RequestRecord,
    joined_status,
    place_of,
)
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.resources import Preemption, Replica, RequestPhase
from gracepoint_operator.workloads import BY_NAME

logger = logging.getLogger(__name__)

ReceiptKey = tuple[str, str]


@dataclasses.dataclass
class _PodTimes:
    """Which pods something has happened to.

    Attributes:
        at: When it happened first, by UID of the pod, in seconds since the epoch.
        first_at: When it happened to the first pod. None if it has not happened.
        last_at: The same for the last pod.
        places: The places of these pods.
    """

    at: dict[str, float] = dataclasses.field(default_factory=dict)
    first_at: float | None = None
    last_at: float | None = None
    places: Places = dataclasses.field(default_factory=Places)

    def add(self, pod: Pod, at: float) -> bool:
        """True if it is the first time for the pod."""
        if pod.uid in self.at:
            return False
        self.at[pod.uid] = at
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        self.places.add(place_of(pod))
        return True


#: How long an entry stays as it is, in seconds for each pod in it. Of 500, it is a second: no record is written more
#: often than that.
_ENTRY_S = 0.002
#: When the receipt of the last pod is due after a signal: seconds, and more for each pod.
_RECEIPTS_WITHIN_S, _RECEIPT_S = 1.0, names.TELLING_ONE_S + names.BETWEEN_RECEIPTS_S


@dataclasses.dataclass
class _Receipts:
    """What is known of one preemption.

    Attributes:
        notified: The pods that this replica has notified.
        acknowledged: The pods that have sent it a receipt.
        entry: What was made of both when it was asked for. None: it was not.
        until_s: When the entry is made anew, on the caller's clock.
    """

    notified: _PodTimes = dataclasses.field(default_factory=_PodTimes)
    acknowledged: _PodTimes = dataclasses.field(default_factory=_PodTimes)
    entry: Replica | None = None
    until_s: float = 0.0

    @property
    def is_urgent(self) -> bool:
        """True if the entry lacks a notice, the first receipt, or the one with which there are as many as notices."""
        if self.entry is None or self.entry.told < len(self.notified.at):
            return True
        before, now = self.entry.acknowledged, len(self.acknowledged.at)
        return before == 0 < now or before < len(self.notified.at) <= now


class AcknowledgementLog:
    """By preemption (namespace, name) and UID of the pod. The first notice and the first acknowledgement count."""

    def __init__(self) -> None:
        self._receipts: dict[ReceiptKey, _Receipts] = {}

    def notified(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod is notified for the first time."""
        return self._of(key).notified.add(pod, at)

    def acknowledged(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod acknowledges for the first time."""
        return self._of(key).acknowledged.add(pod, at)

    def notified_at(self, key: ReceiptKey, pod_uid: str) -> float | None:
        """When the pod was notified first, in seconds since the epoch. None if this replica has not notified it."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.notified.at.get(pod_uid)

    def waits_s(self, key: ReceiptKey, now_s: float) -> float:
        """Returns for how many seconds the entry stays as it is. 0: it is made anew now.

        Args:
            key: The preemption.
            now_s: Seconds on the clock of ``replica``.
        """
        receipts = self._receipts.get(key)
        return 0.0 if receipts is None or receipts.is_urgent else max(0.0, receipts.until_s - now_s)

    def replica(self, key: ReceiptKey, name: str, now_s: float, *, newest: bool = False) -> Replica:
        """Returns this replica's entry in the Preemption's status. Of a large gang it may be one of some seconds ago.

        Args:
            key: The preemption.
            name: The replica's name.
            now_s: Seconds, of a clock that never goes back.
            newest: Whether it is made anew in any case.
        """
        receipts = self._receipts.get(key)
        if receipts is None:
            return _entry(name, _Receipts())
        if receipts.entry is None or newest or not self.waits_s(key, now_s):
            receipts.entry = _entry(name, receipts)
            receipts.until_s = now_s + _ENTRY_S * max(receipts.entry.told, receipts.entry.acknowledged)
        return receipts.entry

    def first_acknowledged_at(self, key: ReceiptKey) -> float | None:
        """When the first pod acknowledged, in seconds since the epoch. None if none has."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.acknowledged.first_at

    def forget(self, key: ReceiptKey) -> None:
        self._receipts.pop(key, None)

    def _of(self, key: ReceiptKey) -> _Receipts:
        return self._receipts.setdefault(key, _Receipts())


def _entry(name: str, receipts: _Receipts) -> Replica:
    notified, acknowledged = receipts.notified, receipts.acknowledged
    return Replica(
        name=name,
        told=len(notified.at),
        acknowledged=len(acknowledged.at),
        told_at=_time(notified.last_at),
        acknowledged_at=_time(acknowledged.last_at),
        told_pods=notified.places.lines(),
        acknowledged_pods=acknowledged.places.lines(),
    )


def _time(at: float | None) -> datetime.datetime | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)


#: The label for requests whose cause is not in the catalogue.
REQUESTED = "Requested"
#: Part of an emergency save -> the stages at which it begins and ends.
PARTS = {
    "agreement": ("frozen", "agreed"),
    "drain": ("agreed", "drained"),
    "save": ("drained", "durable"),
    "commit": ("durable", "committed"),
}


def show_losses(metrics: Metrics) -> None:
    """Shows the series of losses as 0: Prometheus sees no increase in a series that begins with 1.

    An alert reads those of mode Enforce, and failed drills are counted by those of mode Drill.
    """
    for cause in (*signals.Cause, REQUESTED):
        for phase in (Phase.EXPIRED, Phase.FAILED):
            for mode in (Mode.ENFORCE, Mode.DRILL):
                metrics.phases.labels(phase=phase, cause=cause, mode=mode)


def count_outcome(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord, *, pods_live: bool) -> None:
    """Counts the change from one recorded state to the next in the metrics.

    To be called right after a write that changed the phase. The API server accepts such a write only for the version
    that was read, so only one of two replicas succeeds, and each preemption is counted once: sums over the replicas are
    right.

    Args:
        metrics: The metrics.
        before: The record before the write.
        after: The record that was written, in another phase.
        pods_live: True if a pod that the signals were about still runs.
    """
    cause, phase, mode = _cause(after), after.phase, after.spec.mode
    if phase is not Phase.NOTICED:
        metrics.phases.labels(phase=phase, cause=cause, mode=mode).inc()
    if before.status.phase is None:
        # Every preemption begins as Noticed, also one that is written for the first time in a later phase.
        metrics.phases.labels(phase=Phase.NOTICED, cause=cause, mode=mode).inc()
        lead_s = (after.spec.deadline - after.spec.observed_at).total_seconds()
        metrics.lead_s.labels(cause=cause).observe(max(lead_s, 0.0))
    if not phase.ended:
        return
    if phase in (Phase.EVACUATED, Phase.COMMITTED, Phase.PROMOTED) and before.phase is not Phase.EVACUATED:
        _count_save(metrics, after)
    if _was_false_alarm(after, pods_live=pods_live):
        metrics.false_alarms.labels(cause=cause, phase=phase).inc()


def count_receipts(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord) -> None:
    """Counts missing acknowledgements once no more are expected. Call it after every write."""
    receipts = after.status.acknowledgements
    if (
        preemption_status.is_announced(after)
        and receipts is not None
        and _is_settled(after)
        and not _is_settled(before)
        and (after.leaves or _receipts_are_due(after, receipts.expected))
    ):
        metrics.undelivered.inc(max(receipts.expected - receipts.received, 0))


def _was_false_alarm(preemption: PreemptionRecord, *, pods_live: bool) -> bool:
    """True if what the signals announced did not happen.

    A requested drill announces nothing. A preemption that gave way to another one, or whose workload was deleted or
    finished first, was no false alarm.
    """
    if preemption.is_rehearsal:
        return False
    return preemption.end_reason == EndReason.SIGNAL_WENT_AWAY or (preemption.phase is Phase.EXPIRED and pods_live)


def _receipts_are_due(preemption: PreemptionRecord, expected: int) -> bool:
    """True if it ended so late that all pods have had the time to send a receipt, one after another.

    One that a disruption ends during a drill, or that is retracted, may end at once. A gang that leaves sends its
    receipts before that.
    """
    ended_at = preemption.ended_at
    observed_at = preemption.spec.observed_at.timestamp()
    return ended_at is not None and ended_at - observed_at > _RECEIPTS_WITHIN_S + expected * _RECEIPT_S


def _is_settled(preemption: PreemptionRecord) -> bool:
    """True when it is over for the gang too: replicas record acknowledgements a second late, or some of thousands."""
    return preemption.phase.ended and (not preemption.leaves or preemption.timing("exited") is not None)


def _cause(preemption: PreemptionRecord) -> str:
    """The cause as a label. A request may have any cause, and each would be another time series."""
    cause = preemption.spec.cause
    return cause if cause in {str(catalogued) for catalogued in signals.Cause} else REQUESTED


def _count_save(metrics: Metrics, preemption: PreemptionRecord) -> None:
    status = preemption.status
    for part, (first_stage, last_stage) in PARTS.items():
        began_s, ended_s = preemption.timing(first_stage), preemption.timing(last_stage)
        if began_s is not None and ended_s is not None:
            metrics.emergency_s.labels(part=part).observe(max(ended_s - began_s, 0.0))
    # Nothing is lost when a drill is late: its pods live on.
    if status.seconds_to_spare is not None and preemption.spec.mode is not Mode.DRILL:
        metrics.spare_s.observe(status.seconds_to_spare)
    metrics.steps_lost.inc(status.steps_lost or 0)


_API_VERSION = f"{names.GROUP}/{names.API_VERSION}"


class PreemptionWriter:
    """Keeps the records in the API up to date.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        acknowledgements: What only this replica knows.
        policy_writer: Gets what changes a policy's status.
        events: Posts Events. Has this replica's name, the owner of its entries.
        metrics: Counts phases and failures.
        interval_s: Seconds between two writes of one Preemption.

    Attributes:
        made: Namespaces and names of the Preemptions that this replica created, or is creating.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        acknowledgements: AcknowledgementLog,
        policy_writer: PolicyWriter,
        events: EventRecorder,
        metrics: Metrics,
        interval_s: float,
    ) -> None:
        self._api = api
        self._cache = cache
        self._acknowledgements = acknowledgements
        self._metrics = metrics
        show_losses(metrics)
        self._replica = events.replica
        self.made: set[Key] = set()
        self._policy_writer = policy_writer
        self._events = events
        self._write_queue = WriteQueue("preemption", self._write, metrics, interval_s, self._refused)
        self._unrecorded: dict[Key, str] = {}  # name of the policy of each that the API server refuses
        self._entries_due: dict[Key, asyncio.TimerHandle] = {}
        self._closing = False

    def touch(self, preemption: PreemptionRecord, *, urgent: bool = False, after_s: float = 0.0) -> None:
        """Writes the preemption soon.

        Args:
            preemption: The preemption.
            urgent: True if it began or ended just now. Then the write does not wait for the pause to end.
            after_s: How many seconds the first write waits.
        """
        if not preemption.is_restored:  # whatever restores it may also restore its status
            self._write_queue.touch(preemption.key, urgent=urgent, after_s=after_s)

    def touch_entry(self, preemption: PreemptionRecord) -> None:
        """Writes the preemption as soon as this replica's entry is made anew: a pod was notified, or sent a receipt."""
        key, loop = preemption.key, asyncio.get_running_loop()
        wait_s = self._acknowledgements.waits_s(key, loop.time())
        if not wait_s or self._needs_newest(key):
            self.touch(preemption)
        elif key not in self._entries_due:
            self._entries_due[key] = loop.call_later(wait_s, self._entry_is_due, key)

    def _entry_is_due(self, key: Key) -> None:
        del self._entries_due[key]
        if (preemption := self._cache.preemptions.records.get(key)) is not None:
            self.touch_entry(preemption)  # which waits again if the entry was made anew meanwhile

    def _needs_newest(self, key: Key) -> bool:
        """Returns whether an entry of some seconds ago will not do: missing receipts may be counted with this write."""
        preemption = self._cache.preemptions.records.get(key)
        return self._closing or preemption is None or preemption.phase.ended or not preemption.asks_to_leave

    async def settled(self, preemption: PreemptionRecord, timeout_s: float) -> None:
        """Waits until what is known of the preemption now is written, for at most ``timeout_s`` seconds."""
        await self._write_queue.settled(preemption.key, timeout_s)

    def follow(self, current: PreemptionRecord) -> None:
        """Handles a record that any replica wrote: it is written again if it lacks what is known here."""
        if self._write_queue.is_marked(current.key):
            return  # the write reads the record again
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
        if (due := self._entries_due.pop(key, None)) is not None:
            due.cancel()

    async def close(self, timeout_s: float) -> None:
        self._closing = True
        for key, due in list(self._entries_due.items()):
            due.cancel()
            self._entry_is_due(key)
        await self._write_queue.close(timeout_s)

    def _refused(self, key: Key, reason: str | None) -> None:
        """Notes why the API server refuses to write a preemption. None: it is not refused any more."""
        preemption = self._cache.preemptions.records.get(key)
        if reason is None:
            policy = self._unrecorded.pop(key, None)
        elif preemption is None:
            return  # forgotten meanwhile
        else:
            policy = self._unrecorded[key] = preemption.spec.policy.name
        self._metrics.unrecorded.set(len(self._unrecorded))
        if policy is not None:
            self._policy_writer.recording((key[0], policy), key[1], reason)

    async def _write(self, key: Key) -> None:
        namespace, name = key
        preemption = self._cache.preemptions.records.get(key)
        if preemption is None:
            return
        try:
            body = await self._made(preemption)
            stored = PreemptionRecord.of(body)
            if preemption.is_of_another_life(stored):
                logger.error(
                    "a Preemption of another attempt of the gang has this name, what is known under it here is dropped",
                    extra=about(preemption=name, attempt=preemption.spec.restart_attempt),
                )
                self._acknowledgements.forget(key)
                self._cache.preemptions.join(stored)
            joined = self._joined(stored)
            if joined is not None and joined.spec != stored.spec:
                body = await self._api.merge(objects.PREEMPTIONS, namespace, name, {"spec": joined.spec.to_json()})
                await self._announce_move(stored, PreemptionRecord.of(body), str(body["metadata"]["uid"]))
            entry = self._own_entry(stored)
            if entry is not None:
                body = await self._apply(key, entry)
        except client.NotFound as error:
            if preemption.created_at is not None:
                return  # it was deleted; the watch will bring that
            if await self._has_namespace(namespace):  # so the kind is not served just now
                raise client.Unavailable(str(error)) from error
            logger.info(
                "a Preemption was never created, and is dropped with its namespace", extra=about(preemption=name)
            )
            self._acknowledgements.forget(key)
            self._cache.preemptions.drop_unmade(key)
            return
        current = PreemptionRecord.of(body)
        await asyncio.sleep(0)  # with thousands of pods, what came before and what follows take 20 ms each
        joined = self._joined(current)
        if joined is None:
            return
        changes = self._changes(joined, current)
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            written = PreemptionRecord.of(await self._api.merge_status(objects.PREEMPTIONS, namespace, name, patch))
            self._cache.preemptions.join(written)
            await self._announce(current, written, str(body["metadata"]["uid"]))

    async def _made(self, preemption: PreemptionRecord) -> client.JsonObject:
        """The object as the API has it. It is created if it does not exist. 409: the other replica was first."""
        if preemption.created_at is not None:
            return await self._api.get(objects.PREEMPTIONS, preemption.namespace, preemption.name)
        workload = preemption.workload
        body = {
            "apiVersion": _API_VERSION,
            "kind": Preemption.kind_name,
            "metadata": {
                "namespace": preemption.namespace,
                "name": preemption.name,
                "labels": {
                    names.LABEL_POLICY: preemption.spec.policy.name,
                    **BY_NAME[workload.kind].record_labels(workload.name, workload.uid),
                },
            },
            "spec": preemption.spec.to_json(),
        }
        self.made.add(preemption.key)  # the watch may bring it before the answer comes
        try:
            return await self._api.create(objects.PREEMPTIONS, preemption.namespace, body)
        except client.KubeError as error:
            self.made.discard(preemption.key)
            if not isinstance(error, client.AlreadyExists):
                raise
            return await self._api.get(objects.PREEMPTIONS, preemption.namespace, preemption.name)

    async def _has_namespace(self, name: str) -> bool:
        try:
            await self._api.get(objects.NAMESPACES, None, name)
        except client.NotFound:
            return False
        return True

    def _joined(self, current: PreemptionRecord) -> PreemptionRecord | None:
        """The API's record joined with what is known here. None if it was forgotten here."""
        record = self._cache.preemptions.records.get(current.key)
        return None if record is None else record.joined(current)

    def _changes(self, joined: PreemptionRecord, current: PreemptionRecord) -> client.JsonObject:
        """The fields of the status that must be written."""
        status = preemption_status.with_cause(joined.status, joined.spec)
        if status.acknowledgements is None:  # its creator died before the first status
            status = joined_status(
                preemption_status.noticed(len(self._cache.objects.pods_at(joined)), joined.spec), status
            )
        observed_at = joined.spec.observed_at.timestamp()
        first_at = self._acknowledgements.first_acknowledged_at(joined.key)
        if first_at is not None:
            status = preemption_status.with_stage(status, "firstAck", observed_at, first_at)
        names = (
            [pod.name for pod in self._cache.objects.pods_at(joined)] if preemption_status.is_announced(joined) else []
        )
        status = preemption_status.acknowledged(status, names, observed_at)
        if current.generation:
            status = status.model_copy(update={"observed_generation": current.generation})
        return status.changes_since(current.status)

    def _own_entry(self, current: PreemptionRecord) -> Replica | None:
        """This replica's entry, if the record has another one or none."""
        now_s, newest = asyncio.get_running_loop().time(), self._needs_newest(current.key)
        own = self._acknowledgements.replica(current.key, self._replica, now_s, newest=newest)
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
        return await self._api.apply_status(objects.PREEMPTIONS, key[0], key[1], body, manager=manager)

    async def _announce_move(self, before: PreemptionRecord, after: PreemptionRecord, uid: str) -> None:
        moved_s = abs((after.spec.deadline - before.spec.deadline).total_seconds())
        if moved_s > DEADLINE_TOLERANCE_S and before.status.phase is not None:
            await self._events.post(after, uid, preemption_status.note_of_move(after))

    def _pods_live(self, preemption: PreemptionRecord) -> bool:
        """True if a pod that the signals were about still runs."""
        about_it = set(preemption.spec.pods)
        return any(
            pod.name in about_it and pod.namespace == preemption.namespace and preemption.includes(pod)
            for pod in self._cache.objects.pods_of(preemption.spec.workload.uid)
            if not pod.finished and pod.deletion_at is None
        )

    async def _announce(self, before: PreemptionRecord, after: PreemptionRecord, uid: str) -> None:
        notes: list[Note | None] = []
        if before.status.phase is None and after.phase is not Phase.NOTICED:
            notes.append(preemption_status.note_of_phase(after, Phase.NOTICED))
        if before.phase.rank < Phase.AGREED.rank < after.phase.rank and after.status.ordinal is not None:
            notes.append(preemption_status.note_of_phase(after, Phase.AGREED))
        count_receipts(self._metrics, before, after)
        if before.status.phase is not after.status.phase:
            count_outcome(self._metrics, before, after, pods_live=self._pods_live(after))
            notes.append(preemption_status.note_of_phase(after, after.phase))
            logger.info(
                "preemption changed its phase",
                extra=decided(preemption=after.name, phase=after.phase, why=after.status.message),
            )
            self._policy_writer.touch(after.namespace, after.spec.policy.name)
        if before.status.phase is None and not after.spec.exits:
            notes.append(preemption_status.note_of_breaker(after))
        if before.status.restored_step is None and after.status.restored_step is not None:
            notes.append(preemption_status.note_of_resumption(after))
        for note in notes:
            if note is not None:
                await self._events.post(after, uid, note)


#: A request may arrive before its workload, because both may be in one file. It is not refused before this time.
_WORKLOAD_COMES_S = 5.0


class RequestWriter:
    """Writes the answers to requests into their statuses.

    Both replicas decide the same answer and write it. The second write changes nothing. A replica whose view is older
    may find that nothing comes of a request which the other one has adopted. So Superseded is written only over the
    phase from which it was decided.

    Args:
        api: The API server.
        metrics: Counts failures.
        interval_s: Seconds between two writes of one request.
    """

    def __init__(self, api: KubeClient, metrics: Metrics, interval_s: float) -> None:
        self._api = api
        self._answers: dict[Key, Answer] = {}  # the newest one for each request
        self._write_queue = WriteQueue("request", self._write, metrics, interval_s)

    def answer(self, answer: Answer) -> None:
        """Writes an answer soon. The same answer is decided again until the watch brings it, and is written once."""
        key = _key(answer.request.kind, answer.request.namespace, answer.request.name)
        earlier = self._answers.get(key)
        if earlier is None or (earlier.request.uid, earlier.status) != (answer.request.uid, answer.status):
            self._answers[key] = answer
            self._write_queue.touch(key, urgent=True)

    def answer_homeless(self, requests: Iterable[tuple[RequestRecord, Sequence[PreemptionRecord]]], now: float) -> None:
        """Answers requests whose workloads do not exist, some time after they were made.

        Args:
            requests: Each with the Preemption that its status names, if that is known.
            now: Seconds since the epoch.
        """
        for request, preemptions in requests:
            if now - request.created_at <= _WORKLOAD_COMES_S:
                continue
            if (answer := decide.without_workload(request, preemptions)) is not None:
                self.answer(answer)

    def forget(self, kind: objects.Kind, namespace: str, name: str) -> None:
        """Forgets a request that was deleted, or is over."""
        self._answers.pop(_key(kind, namespace, name), None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        answer = self._answers.get(key)
        if answer is None:
            return
        kind, namespace, name = answer.request.kind, answer.request.namespace, answer.request.name
        try:
            stored = await self._api.get(kind, namespace, name)
            if stored["metadata"]["uid"] != answer.request.uid:
                return  # another request of this name; the watch will bring it
            if answer.status.phase is RequestPhase.SUPERSEDED and _phase(stored) != answer.request.status.phase:
                # The watch will bring what the other replica wrote. Then it is decided again.
                if self._answers.get(key) is answer:
                    del self._answers[key]
                return
            patch = {
                "metadata": {"resourceVersion": stored["metadata"]["resourceVersion"]},
                "status": answer.status.to_json(),
            }
            await self._api.merge_status(kind, namespace, name, patch)
        except client.NotFound:
            return


def _key(kind: objects.Kind, namespace: str, name: str) -> Key:
    """Requests of both kinds may have one name."""
    return (namespace, f"{kind.plural}/{name}")


def _phase(body: client.JsonObject) -> str | None:
    phase: str | None = (body.get("status") or {}).get("phase")
    return phase
