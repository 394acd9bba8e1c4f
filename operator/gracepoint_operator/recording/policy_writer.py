"""Writes the statuses of policies: conditions, which workloads name the policy, and what the gangs forecast.

Also keeps the CheckpointPolicies that are copies of a cluster's default, where it is used.

Runs as tasks of a write queue on the controller's event loop. Each write reads the policy, joins it with what is known
here, and writes the result under the version that was read. So both replicas write the same in the end.

A status is written soon if anything in it has changed that people or programs act on. Figures move while a job only
trains: the metrics have them at once. In a status they are written together with such a change, or once they have moved
far, at most every ``FIGURES_S`` (``is_news``, ``moved_far``).
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.messages import Forecast, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_conditions, preemption_status, snapshot_placement, waiting
from gracepoint_operator.decisions.policy_conditions import GangConnection, PodRights, TroubleKey, TroubleNews
from gracepoint_operator.goodput import accounts
from gracepoint_operator.goodput.accounts import stages
from gracepoint_operator.kube import client
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import POLICIES
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import CONDITION_PROGRESSING, CONDITION_STARTED
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.recording.goodput_recorder import GoodputRecorder
from gracepoint_operator.recording.replica_lease import ReplicaLease
from gracepoint_operator.recording.shared_troubles import SharedTroubles
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
    WorkloadSnapshots,
    WorkloadWaits,
)
from gracepoint_operator.workloads import Workload

logger = logging.getLogger(__name__)

#: How far a duration, or a share of an account, has to move until the figure that is written misleads.
_PART, _LEAST_S, _SHARE = 0.25, 1.0, 0.01
#: The newest safe step is written again after so many seconds if nothing else changes. The metrics have it at once.
_SNAPSHOTS_S = 1800.0


def is_news(policy: CheckpointPolicy, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether a new status of a policy says anything that people or programs act on.

    Figures are no news: forecasts, the seconds of accounts, when a save was. They move while a job only trains, the
    metrics have them, and each write of a policy costs the API server a revision, and all who watch policies a refresh.
    Only where pods are protected until the
    next checkpoint, the time of the newest one is news before the operator acts on the one that is written.
    """
    before = policy.status
    if _facts(before) != _facts(after) or (is_stalled(before) and before.forecasts != after.forecasts):
        return True
    younger_than_s = policy.spec.voluntary_disruption.checkpoint_younger_than_seconds
    return bool(younger_than_s) and any(
        _saved_at(entry) > _saved_at(written) and now - _saved_at(written) >= younger_than_s / 2
        for entry, written in _pairs(before, after)
    )


def moved_far(before: CheckpointPolicyStatus, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether figures are so far from those that are written that these mislead."""
    if any(is_notable(before, forecast) for forecast in after.forecasts or ()):
        return True
    written_at = {item.uid: item.time.timestamp() for item in before.snapshots or ()}
    if any(item.time.timestamp() - written_at.get(item.uid, 0.0) > _SNAPSHOTS_S for item in after.snapshots or ()):
        return True
    for entry, written in _pairs(before, after):
        new_spent, written_spent = (
            accounts.read(entry).spent(round(now * 1000)),
            accounts.read(written).spent(round(now * 1000)),
        )
        whole = sum(new_spent.values())
        if any(
            abs(new_spent.get(part, 0) - written_spent.get(part, 0)) > _SHARE * whole
            for part in new_spent.keys() | written_spent.keys()
        ):
            return True
        if (new := entry.suggestion) and (old := written.suggestion) and _is_far(new.every_seconds, old.every_seconds):
            return True
    return False


def is_notable(before: CheckpointPolicyStatus, forecast: WorkloadForecast) -> bool:
    """Returns whether a forecast is the first of its workload, or far from the one that is written."""
    written = next((item for item in before.forecasts or () if item.uid == forecast.uid), None)
    if written is None:
        return True
    return _is_far(forecast.storage_s, written.storage_s) or _is_far(forecast.needed_s, written.needed_s)


def is_stalled(status: CheckpointPolicyStatus) -> bool:
    """Returns whether a gang makes no progress, as far as is written. A newer forecast of it shows that it does."""
    conditions = status.conditions or ()
    return any(item.type == CONDITION_PROGRESSING and item.status is ConditionStatus.FALSE for item in conditions)


def _facts(status: CheckpointPolicyStatus) -> object:
    """What is in a status apart from figures."""
    conditions = {
        item.type: (item.status, item.reason, item.observed_generation, item.message)
        if item.type not in (policy_conditions.CONDITION_FITS_GRACE, snapshot_placement.CONDITION_SNAPSHOTS_SAFE)
        else (item.status, item.reason, item.observed_generation)
        for item in status.conditions or ()
    }
    return (
        (status.observed_generation, status.workloads, status.last_save, status.replicas, conditions),
        status.waits,
        {item.uid: (item.reason, item.copies) for item in status.snapshots or ()},
        {(item.uid, item.trouble): item.message for item in status.troubles or ()},
        {item.uid for item in status.forecasts or ()},
        {entry.uid: (entry.suggestion is None, *stages(accounts.read(entry))) for entry in status.goodput or ()},
    )


def _pairs(
    before: CheckpointPolicyStatus, after: CheckpointPolicyStatus
) -> Iterator[tuple[WorkloadGoodput, WorkloadGoodput]]:
    """The accounts that are in both, the new one first."""
    entries_before = {entry.uid: entry for entry in before.goodput or ()}
    return ((entry, entries_before[entry.uid]) for entry in after.goodput or () if entry.uid in entries_before)


def _saved_at(entry: WorkloadGoodput) -> float:
    """When the newest checkpoint of the current life was saved or restored. 0 if there is none."""
    times = [at for life in entry.lives[-1:] for at in (life.restored, life.saved) if at is not None]
    return max((at.timestamp() for at in times), default=0.0)


def _is_far(new: float, old: float) -> bool:
    return abs(new - old) > max(_LEAST_S, _PART * old)


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
        rights: What the operator may do to pods.

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
        rights: PodRights,
    ) -> None:
        self._api = api
        self._cache = cache
        self._lease = lease
        self._clock = clock
        self._moved: set[Key] = set()  # policies of which only figures have moved since the last write
        self._figures_at: dict[Key, float] = {}  # policy -> when its figures were written last, as far as known here
        self._rights = rights
        self._forecasts: dict[str, WorkloadForecast] = {}  # workload's UID -> newest that came to this replica
        self._unrecorded: dict[Key, dict[str, str]] = {}  # policy -> Preemption's name -> why it is refused
        self._mended: set[Key] = set()  # policies of which nothing is refused any more, until that is written
        self._connections: dict[Key, tuple[GangConnection, ...]] = {}
        self._stalls: dict[Key, dict[str, str]] = {}  # policy -> workload's name -> what is known of its stall
        self.troubles = SharedTroubles(cache)
        self._waits: dict[Key, Callable[[int], Sequence[WorkloadWaits]]] = {}
        self._snapshots: dict[str, WorkloadSnapshots] = {}  # workload's UID -> newest that came to this replica
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
            newest = self._forecasts[workload.uid] = WorkloadForecast(
                name=workload.name,
                uid=workload.uid,
                workload_kind=WorkloadForecast.named(workload.kind),
                drain_seconds=round(forecast.drain_s, 3),
                save_seconds=round(forecast.save_s, 3),
                send_seconds=None if forecast.send_s is None else round(forecast.send_s, 3),
                margin=forecast.margin,
                time=datetime.datetime.fromtimestamp(self._clock(), datetime.UTC),
            )
            policy = self._cache.policies.get((workload.namespace, workload.policy))
            if policy is not None:
                news = is_stalled(policy.status) or is_notable(policy.status, newest)
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
        self._waits = {key: kept for key, kept in self._waits.items() if kept(1) or not is_gone(key)}

    def _changed(self, namespace: str, name: str, news: bool) -> None:
        """Something in the policy's status has changed. ``news``: it is more than a figure."""
        policy = self._cache.policies.get((namespace, name))
        if news or policy is None or policy.spec.voluntary_disruption.checkpoint_younger_than_seconds:
            self.touch(namespace, name)
        else:
            self._moved.add((namespace, name))

    def recording(self, policy: Key, preemption: str, reason: str | None) -> None:
        """Notes that the API server refuses a record, for the reason ``reason``. None: it is not refused any more."""
        refused = self._unrecorded.setdefault(policy, {})
        changed = refused.get(preemption) != reason
        if reason is None:
            refused.pop(preemption, None)
        else:
            refused[preemption] = reason
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

        An empty mapping is written once, and not again: the other replica may learn of a stall after that.
        """
        self._stalls[policy] = dict(stalled)
        self.touch(*policy)

    def trouble(self, workload: Workload, kind: TroubleKind, news: TroubleNews) -> None:
        """Takes what fails in a gang while it trains. A number: it is over since then, in seconds since the epoch."""
        self.troubles.tell(workload, kind, news)
        self.touch(workload.namespace, workload.policy)

    def follow(self, policy: CheckpointPolicy) -> list[TroubleKey]:
        """Returns which troubles another replica has heard the end of."""
        if self.troubles.follow(policy):
            self.touch(policy.namespace, policy.name)
        return self.troubles.take_ended()

    def waits(self, policy: Key, entries: Callable[[int], Sequence[WorkloadWaits]]) -> None:
        """As ``stalls``, for what the policy's gangs wait for before they run.

        Args:
            policy: The policy.
            entries: Returns so many entries at most. Called when they are written: thousands of gangs may wait.
        """
        self._waits[policy] = entries
        self.touch(*policy)

    def snapshots(self, workload: Workload, entry: WorkloadSnapshots) -> None:
        """Takes what is known of a gang's snapshots."""
        before = self._snapshots.get(workload.uid)
        self._snapshots[workload.uid] = entry
        if entry != before:
            if before is None or (before.reason, before.copies) != (entry.reason, entry.copies):
                self.touch(workload.namespace, workload.policy)
            else:  # an age, which no protection of pods waits for
                self._moved.add((workload.namespace, workload.policy))

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
        await self._api.apply_status(POLICIES, *policy, body, manager=manager)

    def leave_connections(self) -> None:
        """This replica ends: it writes no condition Connected any more."""
        self._connections.clear()

    def forget(self, workload_uid: str) -> None:
        """The workload is gone."""
        self._forecasts.pop(workload_uid, None)
        self._snapshots.pop(workload_uid, None)
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
            changes, workloads, stalls, troubles, waits = self._unreadable(body, str(error)), [], None, {}, None
        else:
            self.troubles.follow(policy)
            stalls, waits = self._stalls.get(key), self._waits.get(key)
            workloads = self._workloads(key)
            troubles = self.troubles.news_for(policy, workloads)
            status = self._status(policy, workloads, troubles)
            changes = status.changes_since(policy.status) if self._is_due(policy, status) else {}
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            body = await self._api.merge_status(POLICIES, namespace, name, patch)
            self._figures_at[key] = self._clock()
            self.goodput.written(workloads)
        if stalls == {} and self._stalls.get(key) is stalls:
            del self._stalls[key]
        self.troubles.note_written(body, troubles)
        if waits is not None and not waits(1) and self._waits.get(key) is waits:
            del self._waits[key]
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
            body = await self._api.get(POLICIES, *key)
        except client.NotFound:
            if original is None:
                return None
            logger.info("a namespace gets the default policy", extra=about(namespace=key[0], policy=key[1]))
            return await self._api.create(POLICIES, key[0], original.copy_for(key[0]))
        if original is None or _is_copy(body, original):
            return body
        copy = original.copy_for(key[0])
        patch = {
            "metadata": {name: body["metadata"][name] for name in ("resourceVersion", "uid")}
            | {"ownerReferences": copy["metadata"]["ownerReferences"]},
            "spec": _in_place_of(body.get("spec"), copy["spec"]),
        }
        return await self._api.merge(POLICIES, *key, patch)

    def _unreadable(self, body: client.JsonObject, reason: str) -> client.JsonObject:
        """The status fields of a policy that cannot be read. Ready and Stalled change; the other conditions stay."""
        status, meta = body.get("status") or {}, body["metadata"]
        generation = int(meta.get("generation", 0))
        conditions: list[client.JsonObject] = list(status.get("conditions") or ())
        for condition in (
            policy_conditions.stalled(generation, reason, self._clock()).to_json(),
            policy_conditions.unreadable(generation, reason, self._clock()).to_json(),
        ):
            before: client.JsonObject = next((item for item in conditions if item.get("type") == condition["type"]), {})
            if before.get("status") == condition["status"]:
                condition["lastTransitionTime"] = before.get("lastTransitionTime", condition["lastTransitionTime"])
            conditions = [condition, *(item for item in conditions if item.get("type") != condition["type"])]
        fields = {"observedGeneration": generation, "conditions": conditions}
        return {name: value for name, value in fields.items() if value != status.get(name)}

    def _living(self, entries: Iterable[PolicyReplica]) -> list[PolicyReplica]:
        return [entry for entry in entries if self._lease.lives(entry.name, entry.time.timestamp())]

    def _workloads(self, key: Key) -> list[Workload]:
        objects = self._cache.objects
        workloads = (objects.workloads[uid] for uid in objects.workloads_with_policy(key))
        return sorted(workloads, key=lambda item: item.name)

    def _status(
        self, policy: CheckpointPolicy, workloads: Sequence[Workload], news: Mapping[TroubleKey, TroubleNews]
    ) -> CheckpointPolicyStatus:
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
                rights=self._rights,
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
            connected_before = next(
                (item for item in before if item.type == policy_conditions.CONDITION_CONNECTED), None
            )
            others = policy_conditions.of_others(policy.status.replicas or (), self._lease.replica, self._lease.lives)
            gangs = [policy_conditions.recounted(gang, others) for gang in self._connections[key]]
            connected = policy_conditions.connected_condition(policy, gangs, connected_before, now)
            if connected is not None:
                conditions.append(connected)
        if any(item.type == policy_conditions.CONDITION_STALLED for item in before):
            conditions.append(policy_conditions.stalled(policy.generation, None, now))
        if key in self._stalls:
            conditions.append(preemption_status.progress_condition(policy, self._stalls[key], now))
        uids = {item.uid for item in workloads}
        troubles = policy_conditions.joined_troubles(
            news, policy.status.troubles or (), {item.uid for item in workloads if not item.finished}
        )
        known = policy.status.troubles is not None
        conditions += [
            policy_conditions.trouble_condition(policy, kind, troubles, now)
            for kind in TroubleKind
            if any(trouble == kind for _, trouble in news)
            or any(item.trouble == kind for item in troubles)
            or (known and any(item.type == policy_conditions.CONDITIONS[kind] for item in before))
        ]
        entries = self._waits[key](_WAITS) if key in self._waits else policy.status.waits or ()
        waits = [entry for entry in entries if entry.uid in uids]
        if key in self._waits or any(item.type == CONDITION_STARTED for item in before):
            conditions.append(waiting.start_condition(policy, waits, now))
        with_memory = uids if policy.spec.checkpoint.memory is not None else set[str]()
        snapshots = snapshot_placement.newest_snapshots(
            self._snapshots.values(), policy.status.snapshots or (), with_memory
        )
        if snapshots or any(item.type == snapshot_placement.CONDITION_SNAPSHOTS_SAFE for item in before):
            conditions.append(snapshot_placement.snapshots_condition(policy, snapshots, now))
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
            snapshots=snapshots if snapshots or policy.status.snapshots is not None else None,
            troubles=troubles if troubles or policy.status.troubles is not None else None,
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


def _in_place_of(current: Any, target: Any) -> Any:
    """Returns the merge patch that puts ``target`` in the place of ``current``."""
    if not (isinstance(current, dict) and isinstance(target, dict)):
        return target
    gone = dict.fromkeys(current.keys() - target.keys())
    return {**gone, **{name: _in_place_of(current.get(name), value) for name, value in target.items()}}
