"""Writes Preemptions, policies' statuses and Events to the API.

Runs as tasks of two scribes on the core's event loop. Each write first reads the object, joins it with what
is known here (which only ever adds: ``epochs.joined_status``) and writes the outcome under the version that
was read. So replicas never undo one another, and whoever's write moves a phase writes the Event, once.
"""

from __future__ import annotations

import datetime
import logging
import uuid
from collections.abc import Callable

from gracepoint.wire import names
from gracepoint.wire.messages import Forecast, Phase
from gracepoint_operator import kinds, kube, status
from gracepoint_operator.decide import members
from gracepoint_operator.epochs import Epoch
from gracepoint_operator.kube import Kube
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.objects import format_time
from gracepoint_operator.receipts import Receipts
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicyStatus,
    Condition,
    JobSetForecast,
    PolicyJobSets,
    Preemption,
    PreemptionStatus,
)
from gracepoint_operator.scribe import Key, Scribe
from gracepoint_operator.status import Note
from gracepoint_operator.world import World

log = logging.getLogger(__name__)

_API_VERSION = f"{names.GROUP}/{names.API_VERSION}"


class Recorder:
    """Keeps the API's record up to what this replica knows.

    Args:
        api: The API server.
        world: What is known of the cluster and its epochs.
        receipts: What this replica alone knows.
        metrics: Counts phases and failures.
        clock: Seconds since the epoch.
        replica: This replica's name, owner of its entries.
        interval_s: Pause between two writes of one object.
    """

    def __init__(
        self,
        api: Kube,
        world: World,
        receipts: Receipts,
        metrics: Metrics,
        clock: Callable[[], float],
        replica: str,
        interval_s: float,
    ) -> None:
        self._api = api
        self._world = world
        self._receipts = receipts
        self._metrics = metrics
        self._clock = clock
        self._replica = replica
        self._forecasts: dict[str, JobSetForecast] = {}  # JobSet UID -> newest that came to this replica
        self._preemptions = Scribe("preemption", self._write_preemption, metrics, interval_s)
        self._policies = Scribe("policy", self._write_policy, metrics, interval_s)

    def touch(self, epoch: Epoch, *, urgent: bool = False) -> None:
        """Something about the epoch is new; ``urgent``: it began or ended just now."""
        self._preemptions.touch(epoch.key, urgent=urgent)

    def touch_policy(self, namespace: str, name: str) -> None:
        """Something that a policy's status is made of is new."""
        if (namespace, name) in self._world.policies:
            self._policies.touch((namespace, name))

    def forecast(self, forecast: Forecast) -> None:
        """A gang's newest prediction of an emergency.

        Raises:
            pydantic.ValidationError: Its figures cannot be.
        """
        jobset = self._world.jobsets.get(forecast.jobset_uid)
        if jobset is not None:
            self._forecasts[jobset.uid] = JobSetForecast(
                name=jobset.name,
                uid=jobset.uid,
                drain_seconds=round(forecast.drain_s, 3),
                save_seconds=round(forecast.save_s, 3),
                margin=forecast.margin,
                time=datetime.datetime.fromtimestamp(self._clock(), datetime.UTC),
            )
            self.touch_policy(jobset.namespace, jobset.policy)

    def forget(self, jobset_uid: str) -> None:
        """The JobSet is gone."""
        self._forecasts.pop(jobset_uid, None)

    async def close(self, timeout_s: float) -> None:
        await self._preemptions.close(timeout_s)
        await self._policies.close(timeout_s)

    async def _write_preemption(self, key: Key) -> None:
        namespace, name = key
        epoch = self._world.epochs.get(key)
        if epoch is None:
            return
        try:
            body = await self._made(epoch)
        except kube.NotFound:
            return  # somebody deleted it; what follows from that is decided when the watch says so
        current = Epoch.of(body)
        known = self._world.epochs.get(key)
        if known is None:
            return
        joined = known.joined(current)
        if joined.spec != current.spec:
            body = await self._api.merge(kinds.PREEMPTIONS, namespace, name, {"spec": joined.spec.to_json()})
        wanted = self._with_receipts(joined)
        changes = _changes(wanted, current.status)
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            body = await self._api.merge_status(kinds.PREEMPTIONS, namespace, name, patch)
            written = Epoch.of(body)
            known = self._world.epochs.get(key)
            self._world.put_epoch(written if known is None else known.joined(written))
            await self._announce(current, written)
        await self._write_own_entry(key, current)

    async def _made(self, epoch: Epoch) -> kube.JsonObject:
        """The object as the API has it; made, if it was not there. 409 means that the twin was first."""
        if epoch.created_at is not None:
            return await self._api.get(kinds.PREEMPTIONS, epoch.namespace, epoch.name)
        body = {
            "apiVersion": _API_VERSION,
            "kind": Preemption.kind_name,
            "metadata": {
                "namespace": epoch.namespace,
                "name": epoch.name,
                "labels": {
                    names.LABEL_POLICY: epoch.spec.policy.name,
                    names.JOBSET_LABEL_NAME: epoch.spec.job_set.name,
                    names.JOBSET_LABEL_UID: epoch.spec.job_set.uid,
                },
            },
            "spec": epoch.spec.to_json(),
        }
        try:
            return await self._api.create(kinds.PREEMPTIONS, epoch.namespace, body)
        except kube.AlreadyExists:
            return await self._api.get(kinds.PREEMPTIONS, epoch.namespace, epoch.name)

    def _with_receipts(self, epoch: Epoch) -> PreemptionStatus:
        wanted = epoch.status
        observed_at = epoch.spec.observed_at.timestamp()
        own = self._receipts.replica(epoch.key, self._replica)
        first_at = self._receipts.first_acknowledged_at(epoch.key)
        if first_at is not None:
            wanted = status.with_stage(wanted, "firstAck", observed_at, first_at)
        return status.acknowledged(wanted, own, self._receipts.laggards(epoch.key), observed_at)

    async def _write_own_entry(self, key: Key, current: Epoch) -> None:
        own = self._receipts.replica(key, self._replica)
        if (own.told == 0 and own.acknowledged == 0) or own in (current.status.replicas or ()):
            return
        body = {
            "apiVersion": _API_VERSION,
            "kind": Preemption.kind_name,
            "metadata": {"namespace": key[0], "name": key[1]},
            "status": {"replicas": [own.to_json()]},
        }
        manager = f"gracepoint-{self._replica}"[:128]
        await self._api.apply_status(kinds.PREEMPTIONS, key[0], key[1], body, manager=manager)

    async def _announce(self, before: Epoch, after: Epoch) -> None:
        notes: list[Note | None] = []
        if before.status.phase is None and after.phase is not Phase.NOTICED:
            notes.append(status.note_of_phase(after, Phase.NOTICED))
        if before.status.phase is not after.status.phase:
            self._metrics.phases.labels(phase=after.phase, cause=after.spec.cause).inc()
            notes.append(status.note_of_phase(after, after.phase))
            log.info(
                "preemption moved on",
                extra=about(preemption=after.name, phase=after.phase, why=after.status.message),
            )
            self.touch_policy(after.namespace, after.spec.policy.name)
        if before.status.restored_step is None and after.status.restored_step is not None:
            notes.append(status.note_of_resumption(after))
        for note in notes:
            if note is not None:
                await self._post(after, note)

    async def _post(self, epoch: Epoch, note: Note) -> None:
        """One Event on the JobSet. A failed one is logged: it is news for people, not state."""
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "namespace": epoch.namespace,
                "name": f"{epoch.name}.{uuid.uuid4().hex[:12]}",
            },
            "eventTime": format_time(self._clock()),
            "reportingController": status.EVENT_CONTROLLER,
            "reportingInstance": self._replica[:128],
            "action": note.reason,
            "reason": note.reason,
            "note": note.message[:1024],
            "type": "Warning" if note.warning else "Normal",
            "regarding": {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "namespace": epoch.namespace,
                "name": epoch.spec.job_set.name,
                "uid": epoch.spec.job_set.uid,
            },
        }
        try:
            await self._api.create(kinds.EVENTS, epoch.namespace, body)
        except kube.KubeError as error:
            log.warning("could not post an Event", extra=about(reason=note.reason, error=str(error)))

    async def _write_policy(self, key: Key) -> None:
        namespace, name = key
        if key not in self._world.policies:
            return
        try:
            body = await self._api.get(kinds.POLICIES, namespace, name)
        except kube.NotFound:
            return
        policy = CheckpointPolicy.of(body)
        wanted = self._policy_status(policy)
        changes = _changes(wanted, policy.status)
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            await self._api.merge_status(kinds.POLICIES, namespace, name, patch)

    def _policy_status(self, policy: CheckpointPolicy) -> CheckpointPolicyStatus:
        now = self._clock()
        key = (policy.namespace, policy.name)
        jobsets = sorted(
            (item for item in self._world.jobsets.values() if (item.namespace, item.policy) == key),
            key=lambda item: item.name,
        )
        forecasts = status.newest_forecasts(
            self._forecasts.values(), policy.status.forecasts or (), {item.uid for item in jobsets}
        )
        granted: list[tuple[JobSetForecast, float]] = []
        for forecast in forecasts:
            gang = self._world.gang(forecast.uid)
            grace_s = status.grace_s(members(gang), gang.nodes)
            if grace_s is not None:
                granted.append((forecast, grace_s))
        worst = min(granted, key=lambda item: item[1] - status.needed_s(item[0]), default=None)
        before = policy.status.conditions or []
        conditions: list[Condition] = [status.readiness(policy, now), status.injection(policy, jobsets, now)]
        # Between two lives of a job it has no pods: then the condition stays.
        if worst is not None or not forecasts:
            conditions.append(status.fit(policy, worst, now))
        epochs = [epoch for epoch in self._world.epochs.values() if (epoch.namespace, epoch.spec.policy.name) == key]
        return CheckpointPolicyStatus(
            observed_generation=policy.generation,
            job_sets=PolicyJobSets(count=len(jobsets), names=[item.name for item in jobsets[:50]]),
            conditions=status.joined_conditions(conditions, before),
            forecasts=forecasts,
            last_save=status.last_save(epochs) or policy.status.last_save,
        )


def _changes(
    wanted: PreemptionStatus | CheckpointPolicyStatus, current: PreemptionStatus | CheckpointPolicyStatus
) -> kube.JsonObject:
    """The fields to be written. A replica's own entry is not among them: it is applied, not merged."""
    now, then = wanted.to_json(), current.to_json()
    return {name: value for name, value in now.items() if name != "replicas" and value != then.get(name)}
