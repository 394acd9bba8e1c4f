"""Writes the statuses of policies: conditions, which workloads name the policy, and what the gangs forecast.

Also keeps the CheckpointPolicies that are copies of a cluster's default, where it is used.

Runs as tasks of a write queue on the controller's event loop. Each write reads the policy, joins it with what is known
here, and writes the result under the version that was read. So both replicas write the same in the end.

A status is written soon if anything in it has changed that people or programs act on. Figures move while a job only
trains: the metrics have them at once. In a status they are written together with such a change, or once they have moved
far, at most every ``FIGURES_S`` (``is_news``, ``moved_far``).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.messages import Forecast, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_conditions, preemption_status, waiting
from gracepoint_operator.decisions.policy_conditions import GangConnection
from gracepoint_operator.goodput import accounts
from gracepoint_operator.goodput.accounts import stages
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import CONDITION_PROGRESSING, CONDITION_STARTED
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.goodput_recorder import GoodputRecorder
from gracepoint_operator.recording.replica_lease import ReplicaLease
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicyStatus,
    ClusterCheckpointPolicy,
    Condition,
    ConditionStatus,
    PolicyReplica,
    PolicyWorkloads,
    WorkloadForecast,
    WorkloadGoodput,
    WorkloadWaits,
)
from gracepoint_operator.workloads import Workload

#: How far a duration, or a share of an account, has to move until the figure that is written misleads.
_PART, _LEAST_S, _SHARE = 0.25, 1.0, 0.01


# Which changes of a policy's status are written soon, and which figures have moved too far to stay. Pure.
#
# Figures are forecasts, the seconds of accounts, and when a save was. They move while a job only trains. The metrics
# have them; each write of a policy costs the API server a revision, and all who watch policies a refresh.


def is_news(policy: CheckpointPolicy, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether a new status of a policy says anything that people or programs act on.

    Figures are no news: forecasts, the seconds of accounts, when a save was. Only where pods are protected until the
    next checkpoint, the time of the newest one is news before the operator acts on the one that is written.
    """
    before = policy.status
    if _facts(before) != _facts(after) or (is_stalled(before) and before.forecasts != after.forecasts):
        return True
    younger_than_s = policy.spec.voluntary_disruption.checkpoint_younger_than_seconds
    return bool(younger_than_s) and any(
        _saved_at(entry) > _saved_at(known) and now - _saved_at(known) >= younger_than_s / 2
        for entry, known in _pairs(before, after)
    )


def moved_far(before: CheckpointPolicyStatus, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether figures are so far from those that are written that these mislead."""
    if any(tells_more(before, forecast) for forecast in after.forecasts or ()):
        return True
    for entry, known in _pairs(before, after):
        ours, theirs = (
            accounts.read(entry).spent(round(now * 1000)),
            accounts.read(known).spent(round(now * 1000)),
        )
        whole = sum(ours.values())
        if any(abs(ours.get(part, 0) - theirs.get(part, 0)) > _SHARE * whole for part in ours.keys() | theirs.keys()):
            return True
        if (new := entry.suggestion) and (old := known.suggestion) and _is_far(new.every_seconds, old.every_seconds):
            return True
    return False


def tells_more(before: CheckpointPolicyStatus, forecast: WorkloadForecast) -> bool:
    """Returns whether a forecast is the first of its workload, or far from the one that is written."""
    known = next((item for item in before.forecasts or () if item.uid == forecast.uid), None)
    return known is None or _is_far(forecast.needed_s, known.needed_s)


def is_stalled(status: CheckpointPolicyStatus) -> bool:
    """Returns whether a gang makes no progress, as far as is written. A newer forecast of it shows that it does."""
    conditions = status.conditions or ()
    return any(item.type == CONDITION_PROGRESSING and item.status is ConditionStatus.FALSE for item in conditions)


def _facts(status: CheckpointPolicyStatus) -> object:
    """What is in a status beside figures."""
    conditions = {
        item.type: (item.status, item.reason, item.observed_generation, item.message)
        if item.type != policy_conditions.CONDITION_FITS_GRACE
        else (item.status, item.reason, item.observed_generation)
        for item in status.conditions or ()
    }
    return (
        (status.observed_generation, status.workloads, status.last_save, status.replicas, conditions),
        status.waits,
        {item.uid for item in status.forecasts or ()},
        {entry.uid: (entry.suggestion is None, *stages(accounts.read(entry))) for entry in status.goodput or ()},
    )


def _pairs(
    before: CheckpointPolicyStatus, after: CheckpointPolicyStatus
) -> Iterator[tuple[WorkloadGoodput, WorkloadGoodput]]:
    """The accounts that are in both, the new one first."""
    known = {entry.uid: entry for entry in before.goodput or ()}
    return ((entry, known[entry.uid]) for entry in after.goodput or () if entry.uid in known)


def _saved_at(entry: WorkloadGoodput) -> float:
    """When the newest checkpoint of the current life was saved or restored. 0 if there is none."""
    times = [at for life in entry.lives[-1:] for at in (life.restored, life.saved) if at is not None]
    return max((at.timestamp() for at in times), default=0.0)


def _is_far(new: float, old: float) -> bool:
    return abs(new - old) > max(_LEAST_S, _PART * old)


log = logging.getLogger(__name__)

#: Entries of waits in a policy's status; the limit in its schema.
_WAITS = 50
#: Figures that have moved far are written at most this often, in seconds.
FIGURES_S = 300.0


class PolicyWriter:
    """Keeps the statuses of the policies up to date.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        lease: Has this replica's name, and says which others live.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Seconds between two writes of one policy.
        protects_pods: Whether the operator has the right to annotate pods.
        deletes_pods: Whether it has the right to delete pods.

    Attributes:
        goodput: Keeps the accounts of the workloads' time, which are in the statuses.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        lease: ReplicaLease,
        metrics: Metrics,
        clock: Callable[[], float],
        interval_s: float,
        *,
        protects_pods: bool = False,
        deletes_pods: bool = False,
    ) -> None:
        self._api = api
        self._cache = cache
        self._lease = lease
        self._clock = clock
        self._moved: set[Key] = set()  # policies of which only figures have moved since the last write
        self._figures_at: dict[Key, float] = {}  # policy -> when its figures were written last, as far as known here
        self._protects_pods = protects_pods
        self._deletes_pods = deletes_pods
        self._forecasts: dict[str, WorkloadForecast] = {}  # workload's UID -> newest that came to this replica
        self._unrecorded: dict[Key, dict[str, str]] = {}  # policy -> Preemption's name -> why it is refused
        self._mended: set[Key] = set()  # policies of which nothing is refused any more, until that is written
        self._connections: dict[Key, tuple[GangConnection, ...]] = {}
        self._stalls: dict[Key, dict[str, str]] = {}  # policy -> workload's name -> what is known of its stall
        self._troubles: dict[tuple[Key, TroubleKind], dict[str, str]] = {}  # likewise, of each kind
        self._waits: dict[Key, tuple[WorkloadWaits, ...]] = {}
        self.goodput = GoodputRecorder(cache, self._changed, metrics, clock)
        self._write_queue = WriteQueue("policy", self._write, metrics, interval_s)

    def touch(self, namespace: str, name: str) -> None:
        """Writes the policy's status soon, because something in it may have changed."""
        key = (namespace, name)
        if self._cache.policies.get(key) is not None or key in self._cache.unreadable_policies():
            self._write_queue.touch(key)

    def forecast(self, forecast: Forecast) -> None:
        """Takes a gang's newest forecast of an emergency save.

        Raises:
            pydantic.ValidationError: A figure is impossible.
        """
        workload = self._cache.objects.workloads.get(forecast.workload_uid)
        if workload is not None:
            made = self._forecasts[workload.uid] = WorkloadForecast(
                name=workload.name,
                uid=workload.uid,
                workload_kind=WorkloadForecast.named(workload.kind),
                drain_seconds=round(forecast.drain_s, 3),
                save_seconds=round(forecast.save_s, 3),
                margin=forecast.margin,
                time=datetime.datetime.fromtimestamp(self._clock(), datetime.UTC),
            )
            policy = self._cache.policies.get((workload.namespace, workload.policy))
            if policy is not None:
                news = is_stalled(policy.status) or tells_more(policy.status, made)
                self._changed(workload.namespace, workload.policy, news)

    def write_moved(self) -> None:
        """Writes figures that have moved while nothing else has changed. Called now and then."""
        self._forget_deleted()
        now = self._clock()
        for key in list(self._moved):
            if now - self._figures_at.setdefault(key, now) >= FIGURES_S:
                self._moved.discard(key)
                self.touch(*key)

    def _forget_deleted(self) -> None:
        """Drops what is kept for policies that do not exist any more. Namespaces come and go for years."""
        unreadable = self._cache.unreadable_policies()

        def is_gone(key: Key) -> bool:
            return self._cache.policies.get(key) is None and key not in unreadable

        self._moved = {key for key in self._moved if not is_gone(key)}
        self._mended = {key for key in self._mended if not is_gone(key)}
        for kept in (self._figures_at, self._connections):
            for key in [key for key in kept if is_gone(key)]:
                del kept[key]
        # A stall that lasts is written if the policy comes back. None is nothing.
        self._stalls = {key: kept for key, kept in self._stalls.items() if kept or not is_gone(key)}
        self._troubles = {key: kept for key, kept in self._troubles.items() if kept or not is_gone(key[0])}
        self._waits = {key: kept for key, kept in self._waits.items() if kept or not is_gone(key)}

    def _changed(self, namespace: str, name: str, news: bool) -> None:
        """Something in the policy's status has changed. ``news``: it is more than a figure."""
        policy = self._cache.policies.get((namespace, name))
        if news or policy is None or policy.spec.voluntary_disruption.checkpoint_younger_than_seconds:
            self.touch(namespace, name)
        else:
            self._moved.add((namespace, name))

    def recording(self, policy: Key, preemption: str, why: str | None) -> None:
        """Notes that the API server refuses a record, for the reason ``why``. None: it is not refused any more."""
        refused = self._unrecorded.setdefault(policy, {})
        changed = refused.get(preemption) != why
        if why is None:
            refused.pop(preemption, None)
        else:
            refused[preemption] = why
        if not refused:
            del self._unrecorded[policy]
            if changed:
                self._mended.add(policy)
        if changed:
            self.touch(*policy)

    def connections(self, policy: Key, gangs: Sequence[GangConnection]) -> None:
        """Takes how many pods of the policy's gangs are connected.

        The numbers of the other replicas are read again for each write, so that all replicas write the same.
        """
        if self._connections.get(policy) != tuple(gangs):
            self._connections[policy] = tuple(gangs)
            self.touch(*policy)

    def stalls(self, policy: Key, stalled: Mapping[str, str]) -> None:
        """Takes the stalls of the policy's gangs: by the workload's name, what is known of each.

        An empty mapping is written once, and not again: the other replica may be told of a stall after that.
        """
        self._stalls[policy] = dict(stalled)
        self.touch(*policy)

    def troubles(self, policy: Key, kind: TroubleKind, failing: Mapping[str, str]) -> None:
        """As ``stalls``, for what goes wrong while training goes on."""
        self._troubles[policy, kind] = dict(failing)
        self.touch(*policy)

    def waits(self, policy: Key, entries: Sequence[WorkloadWaits]) -> None:
        """As ``stalls``, for what the policy's gangs wait for before they run."""
        self._waits[policy] = tuple(sorted(entries, key=lambda entry: entry.name)[:_WAITS])
        self.touch(*policy)

    async def write_own_entry(self, policy: Key, entry: PolicyReplica) -> None:
        """Writes this replica's entry into a policy's status now, and nothing else.

        Raises:
            client.KubeError: It is not written.
        """
        body = {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": CheckpointPolicy.kind_name,
            "metadata": {"namespace": policy[0], "name": policy[1]},
            "status": {"replicas": [entry.to_json()]},
        }
        manager = f"gracepoint-{self._lease.replica}"[:128]
        await self._api.apply_status(kinds.POLICIES, *policy, body, manager=manager)

    def leave_connections(self) -> None:
        """This replica ends: it writes no condition Connected any more."""
        self._connections.clear()

    def forget(self, workload_uid: str) -> None:
        """The workload is gone."""
        self._forecasts.pop(workload_uid, None)
        self.goodput.forget(workload_uid)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        namespace, name = key
        mended = key in self._mended  # what comes during the writes below is for the next one
        body = await self._current(key)
        if body is None:
            return
        try:
            policy = CheckpointPolicy.of(body)
        except Unreadable as error:
            changes, workloads, stalls, told, waits = self._unreadable(body, str(error)), [], None, {}, None
        else:
            stalls, waits = self._stalls.get(key), self._waits.get(key)
            told = {kind: self._troubles[key, kind] for kind in TroubleKind if (key, kind) in self._troubles}
            workloads = self._workloads(key)
            status = self._status(policy, workloads)
            changes = status.changes_since(policy.status) if self._is_due(policy, status) else {}
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            await self._api.merge_status(kinds.POLICIES, namespace, name, patch)
            self._figures_at[key] = self._clock()
            self.goodput.written(workloads)
        if stalls == {} and self._stalls.get(key) is stalls:
            del self._stalls[key]
        if waits == () and self._waits.get(key) is waits:
            del self._waits[key]
        for kind, failing in told.items():
            if not failing and self._troubles.get((key, kind)) is failing:
                del self._troubles[key, kind]
        if mended and key not in self._unrecorded:
            self._mended.discard(key)

    def _is_due(self, policy: CheckpointPolicy, status: CheckpointPolicyStatus) -> bool:
        """Returns whether a status is written in place of the one that was read."""
        now, key = self._clock(), (policy.namespace, policy.name)
        if is_news(policy, status, now):
            return True
        rested = now - self._figures_at.setdefault(key, now) >= FIGURES_S
        return rested and moved_far(policy.status, status, now)

    async def _current(self, key: Key) -> client.JsonObject | None:
        """Reads a policy. If it is the copy of a cluster's default, it is made, or made like the default, before that.

        Both replicas do so. None: there is no such policy.
        """
        original = self._cache.policies.original(key)
        try:
            body = await self._api.get(kinds.POLICIES, *key)
        except client.NotFound:
            if original is None:
                return None
            log.info("a namespace gets the default policy", extra=about(namespace=key[0], policy=key[1]))
            return await self._api.create(kinds.POLICIES, key[0], original.copy_for(key[0]))
        if original is None or _is_copy(body, original):
            return body
        wanted = original.copy_for(key[0])
        patch = {
            "metadata": {name: body["metadata"][name] for name in ("resourceVersion", "uid")}
            | {"ownerReferences": wanted["metadata"]["ownerReferences"]},
            "spec": _in_place_of(body.get("spec"), wanted["spec"]),
        }
        return await self._api.merge(kinds.POLICIES, *key, patch)

    def _unreadable(self, body: client.JsonObject, why: str) -> client.JsonObject:
        """The status fields of a policy that cannot be read. Ready and Stalled change; the other conditions stay."""
        status, meta = body.get("status") or {}, body["metadata"]
        generation = int(meta.get("generation", 0))
        conditions: list[client.JsonObject] = list(status.get("conditions") or ())
        for made in (
            policy_conditions.stalled(generation, why, self._clock()).to_json(),
            policy_conditions.unreadable(generation, why, self._clock()).to_json(),
        ):
            before: client.JsonObject = next((item for item in conditions if item.get("type") == made["type"]), {})
            if before.get("status") == made["status"]:
                made["lastTransitionTime"] = before.get("lastTransitionTime", made["lastTransitionTime"])
            conditions = [made, *(item for item in conditions if item.get("type") != made["type"])]
        wanted = {"observedGeneration": generation, "conditions": conditions}
        return {name: value for name, value in wanted.items() if value != status.get(name)}

    def _living(self, entries: Iterable[PolicyReplica]) -> list[PolicyReplica]:
        return [entry for entry in entries if self._lease.lives(entry.name, entry.time.timestamp())]

    def _workloads(self, key: Key) -> list[Workload]:
        objects = self._cache.objects
        found = (objects.workloads[uid] for uid in objects.workloads_with_policy(key))
        return sorted(found, key=lambda item: item.name)

    def _status(self, policy: CheckpointPolicy, workloads: Sequence[Workload]) -> CheckpointPolicyStatus:
        now, key = self._clock(), (policy.namespace, policy.name)
        forecasts = policy_conditions.newest_forecasts(
            self._forecasts.values(), policy.status.forecasts or (), {item.uid for item in workloads}
        )
        granted: list[tuple[WorkloadForecast, float]] = []
        for forecast in forecasts:
            gang = self._cache.gang(forecast.uid)
            grace_s = policy_conditions.grace_s(gang.processes, gang.nodes)
            if grace_s is not None:
                granted.append((forecast, grace_s))
        worst = min(granted, key=lambda item: item[1] - item[0].needed_s, default=None)
        before = policy.status.conditions or []
        preemptions = self._cache.preemptions.preemptions_under(key)
        conditions: list[Condition] = [
            policy_conditions.readiness(
                policy,
                self._cache.policies.limited(policy),
                now,
                protects_pods=self._protects_pods,
                deletes_pods=self._deletes_pods,
                hold_limit=self._cache.policies.hold_limit(policy.namespace),
                withdrawn=self._cache.policies.why_withdrawn(policy),
            ),
            policy_conditions.injection(policy, workloads, now),
        ]
        recorded = policy_conditions.recording(
            policy,
            self._unrecorded.get(key, {}),
            preemptions,
            next((item for item in before if item.type == policy_conditions.CONDITION_RECORDED), None),
            now,
            mended=key in self._mended,
        )
        if recorded is not None:
            conditions.append(recorded)
        if key in self._connections:
            known = next((item for item in before if item.type == policy_conditions.CONDITION_CONNECTED), None)
            others = policy_conditions.of_others(policy.status.replicas or (), self._lease.replica, self._lease.lives)
            gangs = [policy_conditions.recounted(gang, others) for gang in self._connections[key]]
            connected = policy_conditions.connected_condition(policy, gangs, known, now)
            if connected is not None:
                conditions.append(connected)
        if any(item.type == policy_conditions.CONDITION_STALLED for item in before):
            conditions.append(policy_conditions.stalled(policy.generation, None, now))
        if key in self._stalls:
            conditions.append(preemption_status.condition(policy, self._stalls[key], now))
        conditions += [
            policy_conditions.trouble_condition(policy, kind, self._troubles[key, kind], now)
            for kind in TroubleKind
            if (key, kind) in self._troubles
        ]
        uids = {item.uid for item in workloads}
        waits = [entry for entry in self._waits.get(key, policy.status.waits or ()) if entry.uid in uids]
        if key in self._waits or any(item.type == CONDITION_STARTED for item in before):
            conditions.append(waiting.start_condition(policy, waits, now))
        # While a workload restarts it has no pods. Then the condition stays.
        if worst is not None or not forecasts:
            conditions.append(policy_conditions.fit(policy, worst, now))
        return CheckpointPolicyStatus(
            observed_generation=policy.generation,
            workloads=PolicyWorkloads(count=len(workloads), names=[item.name for item in workloads[:50]]),
            conditions=policy_conditions.joined_conditions(conditions, before),
            forecasts=forecasts,
            goodput=self.goodput.entries(policy, workloads, forecasts),
            last_save=policy_conditions.last_save(preemptions, policy.status.last_save),
            waits=waits if waits or policy.status.waits is not None else None,
            replicas=None if policy.status.replicas is None else self._living(policy.status.replicas),
        )


def _is_copy(body: client.JsonObject, original: ClusterCheckpointPolicy) -> bool:
    """True if a policy says what the default says, as far as this version knows; a newer replica may know more."""
    try:
        policy = CheckpointPolicy.of(body)
    except Unreadable:
        return False
    owners = [owner.get("uid") for owner in policy.metadata.get("ownerReferences") or ()]
    return policy.spec == original.spec.default and owners == [original.uid]


def _in_place_of(found: Any, wanted: Any) -> Any:
    """Returns the merge patch that puts ``wanted`` in the place of ``found``."""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return wanted
    gone = dict.fromkeys(found.keys() - wanted.keys())
    return {**gone, **{name: _in_place_of(found.get(name), value) for name, value in wanted.items()}}


EVERY_S = 30.0
_RETRIES_S = 20.0
_NOT_RECORDED = "connections not recorded, trying again"
_Key = tuple[str, str]


def _by_job() -> collections.defaultdict[str, collections.Counter[str]]:
    return collections.defaultdict(collections.Counter)


@dataclasses.dataclass
class _PodCounts:
    """Numbers of pods of the current attempts, by UID of the workload.

    Attributes:
        running: Those that run, by the name of the replicatedJob.
        young: Those of these that may still be starting.
        connected: Those that are connected here, by the name of the replicatedJob.
    """

    running: collections.defaultdict[str, collections.Counter[str]] = dataclasses.field(default_factory=_by_job)
    young: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    connected: collections.defaultdict[str, collections.Counter[str]] = dataclasses.field(default_factory=_by_job)


class ConnectionWriter:
    """Records how many pods of the gangs are connected, and posts an Event on a gang whose pods stay away.

    One task on the controller's event loop looks twice a minute: it counts the pods that run and those that are
    connected to this replica, joins the numbers of the other replicas, which the watch brings with the policies, and
    hands the result to ``PolicyWriter``. It writes this replica's numbers if they changed. ``close`` takes them back.
    Each look also renews this replica's Lease, which says that its numbers still count (``ReplicaLease``).

    While the API server does not answer, the other replicas' numbers are old, so nothing is judged. The API server may
    also refuse writes to some policies only, for example while an admission webhook is down. A replica that cannot
    write into a policy does not judge that policy, and goes on with the others. A replica that has nothing to write
    there does not notice, and may count the pods of other replicas as missing. A replica that cannot renew its Lease
    judges nothing.

    Args:
        cache: What is known of the cluster.
        connected: Returns the UIDs of the pods that are connected to this replica.
        lease: Says that this replica lives, and which others do.
        policy_writer: Writes numbers and condition.
        events: Posts Events.
        metrics: Shows how many pods are not connected.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        cache: ClusterCache,
        connected: Callable[[], Collection[str]],
        lease: ReplicaLease,
        policy_writer: PolicyWriter,
        events: EventRecorder,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._connected = connected
        self._lease = lease
        self._policy_writer = policy_writer
        self._metrics = metrics
        self._clock = clock
        self._recorded: set[_Key] = set()  # policies whose status has numbers of this replica
        self._unwritten: dict[_Key, client.Unavailable] = {}  # policies whose newest write failed; longest tried first
        self._unrenewed = ""  # why the Lease could not be renewed
        self._events = events
        self._missing_since: dict[str, float] = {}  # UID of the workload -> since when pods are missing
        self._running_since: dict[str, float] = {}  # UID of the pod -> since when it was seen to run
        self._told: dict[str, int] = {}  # UID of the workload -> attempt of which an Event says that pods are missing

    async def look(self) -> None:
        """Counts once, and writes what changed. Does nothing while the API server does not answer.

        To be called every ``EVERY_S``.
        """
        if self._lease.is_watching(policy_conditions.RENEWED_S):
            await self._renew()
            await self._write_all()
            self._policy_writer.write_moved()
            if self._lease.sees_others(policy_conditions.RENEWED_S):
                await self._judge()
                return
        self._missing_since.clear()  # the other replicas could not renew their numbers either

    async def close(self, timeout_s: float) -> None:
        """Takes this replica's numbers back, for at most ``timeout_s`` seconds. Call it when ``run`` has ended."""
        self._policy_writer.leave_connections()
        entry = policy_conditions.empty_entry(self._lease.replica, self._clock())
        writes = [self._apply(key, entry) for key in self._recorded & set(self._cache.policies)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*writes, return_exceptions=True)
                await self._lease.give_up()

    async def _renew(self) -> None:
        try:
            await self._lease.renew()
            self._unrenewed = ""
        except client.KubeError as error:
            if str(error) != self._unrenewed:
                log.warning("the replica's Lease is not renewed, trying again", extra=about(error=str(error)))
            self._unrenewed = str(error)

    async def _write_all(self) -> None:
        """Writes this replica's numbers into each policy. Those that could not be written last time come last.

        Each of them may take as long as a request may. The time for all of them is limited, and the rest has its turn
        in the next round, so that the numbers in the others do not become too old meanwhile.
        """
        counted = self._counted()
        left: dict[_Key, client.Unavailable] = {}
        unwritten: dict[_Key, client.Unavailable] = {}
        begun_at = self._clock()
        for key in self._in_turn():
            await asyncio.sleep(0)  # a notice does not wait for all policies
            policy = self._cache.policies.get(key)
            if policy is None:
                continue
            if key in self._unwritten and self._clock() - begun_at > _RETRIES_S:
                left[key] = self._unwritten[key]
                continue
            own = self._own(self._uids(key), counted)
            entry = policy_conditions.own_entry(self._lease.replica, own, policy.status.replicas or (), self._clock())
            if entry is None:
                continue
            try:
                await self._apply(key, entry)
            except client.Unavailable as error:
                unwritten[key] = error
        for key in sorted(unwritten.keys() - self._unwritten.keys())[:1]:  # in an outage these are all policies
            more = len(unwritten) - 1
            log.warning(_NOT_RECORDED, extra=about(policy="/".join(key), more=more, error=str(unwritten[key])))
        self._unwritten = left | unwritten

    def _in_turn(self) -> list[_Key]:
        known = set(self._cache.policies)
        return [*sorted(known - self._unwritten.keys()), *(key for key in self._unwritten if key in known)]

    async def _judge(self) -> None:
        counted = self._counted()  # anew, as the writes may have taken long
        missing = 0
        for key in self._cache.policies:
            await asyncio.sleep(0)
            if (policy := self._cache.policies.get(key)) is None:
                continue  # deleted meanwhile
            uids = self._uids(key)
            if key in self._unwritten:  # the other replicas could not renew their numbers there either
                for uid in uids:
                    self._missing_since.pop(uid, None)
                continue
            gangs = self._gangs(policy, uids, counted)
            self._policy_writer.connections(key, gangs)
            missing += sum(gang.expected - gang.connected for gang in gangs if gang.late)
            for gang in gangs:
                await self._post(gang)
        self._metrics.pods_not_connected.set(missing)
        for known in (self._missing_since, self._told):
            for uid in known.keys() - self._cache.objects.workloads.keys():
                del known[uid]

    def _uids(self, key: _Key) -> list[str]:
        """UIDs of the known workloads of a policy."""
        return sorted(self._cache.objects.workloads_with_policy(key) & self._cache.objects.workloads.keys())

    @staticmethod
    def _own(uids: list[str], counted: _PodCounts) -> dict[str, dict[str, int]]:
        """How many pods are connected here, by workload and, if several replicatedJobs train, by their names."""
        found = {}
        for uid in uids:
            if here := counted.connected.get(uid):
                several = len(counted.running[uid]) > 1
                found[uid] = dict(here) if several else {"": here.total()}
        return found

    def _counted(self) -> _PodCounts:
        """Counts pods of the current attempts."""
        here, now = set(self._connected()), self._clock()
        counted = _PodCounts()
        workloads, before = self._cache.objects.workloads, self._running_since
        self._running_since = {}
        for pod in self._cache.objects.pods.values():
            if pod.phase != "Running" or pod.deletion_at is not None or not pod.policy or pod.helps:
                continue
            workload = workloads.get(pod.workload_uid)
            if workload is None or workload.finished or workload.deleted or not workload.injected:
                continue
            if pod.restart_attempt == workload.restarts and pod.namespace == workload.namespace:
                since = self._running_since[pod.uid] = before.get(pod.uid, now)
                counted.running[workload.uid][pod.replicated_job] += 1
                counted.young[workload.uid] += now - since < policy_conditions.GRACE_S
                counted.connected[workload.uid][pod.replicated_job] += pod.uid in here
        return counted

    def _gangs(
        self,
        policy: CheckpointPolicy,
        uids: list[str],
        counted: _PodCounts,
    ) -> list[GangConnection]:
        now = self._clock()
        others = policy_conditions.of_others(policy.status.replicas or (), self._lease.replica, self._lease.lives)
        gangs = []
        for uid in uids:
            running = counted.running[uid].total()
            if not running:
                self._missing_since.pop(uid, None)
                continue
            workload, here = self._cache.objects.workloads[uid], counted.connected[uid]
            jobs = counted.running[uid]
            silent = tuple(sorted(name for name in jobs if not here[name])) if len(jobs) > 1 else ()
            gang = GangConnection(workload, workload.restarts, 0, running, True, here.total(), silent)
            gang = policy_conditions.recounted(gang, others)
            if gang.connected >= running:
                self._missing_since.pop(uid, None)
                late = False
            else:
                lasts = now - self._missing_since.setdefault(uid, now) >= policy_conditions.GRACE_S
                late = lasts and running - gang.connected > counted.young[uid]  # these may be the ones that are missing
            gangs.append(dataclasses.replace(gang, late=late))
        return gangs

    async def _apply(self, key: _Key, entry: PolicyReplica) -> None:
        try:
            await self._policy_writer.write_own_entry(key, entry)
            self._recorded.add(key)
        except client.NotFound:
            return
        except client.Unavailable:
            raise
        except client.KubeError as error:
            log.warning(_NOT_RECORDED, extra=about(policy="/".join(key), error=str(error)))

    async def _post(self, gang: GangConnection) -> None:
        uid, told = gang.workload.uid, self._told.get(gang.workload.uid)
        if gang.late and told != gang.attempt:
            self._told[uid] = gang.attempt
            log.warning(
                "pods of a gang are not connected",
                extra=about(workload=gang.workload.name, connected=gang.connected, expected=gang.expected),
            )
        elif told is not None and not gang.late and gang.connected >= gang.expected:
            del self._told[uid]
        else:
            return
        await self._events.post_on(gang.workload, policy_conditions.connection_note(gang), f"{gang.attempt}")
