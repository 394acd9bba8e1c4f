"""Writes the statuses of policies: conditions, which workloads name the policy, and what the gangs forecast.

Also keeps the CheckpointPolicies that are copies of a cluster's default, where it is used.

Runs as tasks of a write queue on the controller's event loop. Each write reads the policy, joins it with what is known
here, and writes the result under the version that was read. So both replicas write the same in the end.

A status is written soon if anything in it has changed that people or programs act on. Figures move while a job only
trains: the metrics have them at once. In a status they are written together with such a change, or once they have moved
far, at most every ``FIGURES_S`` (``status_news.is_news``, ``status_news.moved_far``).
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint.wire.messages import Forecast, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.statuses import connectivity, policy_status, progress, troubles
from gracepoint_operator.decisions.statuses.connectivity import GangConnection
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.recording.policies import status_news
from gracepoint_operator.recording.policies.goodput_recorder import GoodputRecorder
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicyStatus,
    ClusterCheckpointPolicy,
    Condition,
    PolicyReplica,
    PolicyWorkloads,
    WorkloadForecast,
)
from gracepoint_operator.workloads import Workload

log = logging.getLogger(__name__)

#: Figures that have moved far are written at most this often, in seconds.
FIGURES_S = 300.0


class PolicyWriter:
    """Keeps the statuses of the policies up to date.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        replica: This replica's name.
        interval_s: Seconds between two writes of one policy.
        lives: Returns whether a replica lives that has written an entry at that time.
        protects_pods: Whether the operator has the right to annotate pods.

    Attributes:
        goodput: Keeps the accounts of the workloads' time, which are in the statuses.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        metrics: Metrics,
        clock: Callable[[], float],
        replica: str,
        interval_s: float,
        lives: Callable[[str, float], bool],
        *,
        protects_pods: bool = False,
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._replica = replica
        self._lives = lives
        self._moved: set[Key] = set()  # policies of which only figures have moved since the last write
        self._figures_at: dict[Key, float] = {}  # policy -> when its figures were written last, as far as known here
        self._protects_pods = protects_pods
        self._forecasts: dict[str, WorkloadForecast] = {}  # workload's UID -> newest that came to this replica
        self._unrecorded: dict[Key, dict[str, str]] = {}  # policy -> Preemption's name -> why it is refused
        self._mended: set[Key] = set()  # policies of which nothing is refused any more, until that is written
        self._connections: dict[Key, tuple[GangConnection, ...]] = {}
        self._stalls: dict[Key, dict[str, str]] = {}  # policy -> workload's name -> what is known of its stall
        self._troubles: dict[tuple[Key, TroubleKind], dict[str, str]] = {}  # likewise, of each kind
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
                news = status_news.is_stalled(policy.status) or status_news.tells_more(policy.status, made)
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
            changes, workloads, stalls, told = self._unreadable(body, str(error)), [], None, {}
        else:
            stalls = self._stalls.get(key)
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
        for kind, failing in told.items():
            if not failing and self._troubles.get((key, kind)) is failing:
                del self._troubles[key, kind]
        if mended and key not in self._unrecorded:
            self._mended.discard(key)

    def _is_due(self, policy: CheckpointPolicy, status: CheckpointPolicyStatus) -> bool:
        """Returns whether a status is written in place of the one that was read."""
        now, key = self._clock(), (policy.namespace, policy.name)
        if status_news.is_news(policy, status, now):
            return True
        rested = now - self._figures_at.setdefault(key, now) >= FIGURES_S
        return rested and status_news.moved_far(policy.status, status, now)

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
            policy_status.stalled(generation, why, self._clock()).to_json(),
            policy_status.unreadable(generation, why, self._clock()).to_json(),
        ):
            before: client.JsonObject = next((item for item in conditions if item.get("type") == made["type"]), {})
            if before.get("status") == made["status"]:
                made["lastTransitionTime"] = before.get("lastTransitionTime", made["lastTransitionTime"])
            conditions = [made, *(item for item in conditions if item.get("type") != made["type"])]
        wanted = {"observedGeneration": generation, "conditions": conditions}
        return {name: value for name, value in wanted.items() if value != status.get(name)}

    def _living(self, entries: Iterable[PolicyReplica]) -> list[PolicyReplica]:
        return [entry for entry in entries if self._lives(entry.name, entry.time.timestamp())]

    def _workloads(self, key: Key) -> list[Workload]:
        objects = self._cache.objects
        found = (objects.workloads[uid] for uid in objects.workloads_with_policy(key))
        return sorted(found, key=lambda item: item.name)

    def _status(self, policy: CheckpointPolicy, workloads: Sequence[Workload]) -> CheckpointPolicyStatus:
        now, key = self._clock(), (policy.namespace, policy.name)
        forecasts = policy_status.newest_forecasts(
            self._forecasts.values(), policy.status.forecasts or (), {item.uid for item in workloads}
        )
        granted: list[tuple[WorkloadForecast, float]] = []
        for forecast in forecasts:
            gang = self._cache.gang(forecast.uid)
            grace_s = policy_status.grace_s(gang.processes, gang.nodes)
            if grace_s is not None:
                granted.append((forecast, grace_s))
        worst = min(granted, key=lambda item: item[1] - item[0].needed_s, default=None)
        before = policy.status.conditions or []
        epochs = self._cache.preemptions.epochs_under(key)
        conditions: list[Condition] = [
            policy_status.readiness(
                policy,
                self._cache.policies.limited(policy),
                now,
                protects_pods=self._protects_pods,
                hold_limit=self._cache.policies.hold_limit(policy.namespace),
                withdrawn=self._cache.policies.why_withdrawn(policy),
            ),
            policy_status.injection(policy, workloads, now),
        ]
        recorded = policy_status.recording(
            policy,
            self._unrecorded.get(key, {}),
            epochs,
            next((item for item in before if item.type == policy_status.CONDITION_RECORDED), None),
            now,
            mended=key in self._mended,
        )
        if recorded is not None:
            conditions.append(recorded)
        if key in self._connections:
            known = next((item for item in before if item.type == connectivity.CONDITION_CONNECTED), None)
            others = connectivity.of_others(policy.status.replicas or (), self._replica, self._lives)
            gangs = [connectivity.recounted(gang, others) for gang in self._connections[key]]
            connected = connectivity.condition(policy, gangs, known, now)
            if connected is not None:
                conditions.append(connected)
        if any(item.type == policy_status.CONDITION_STALLED for item in before):
            conditions.append(policy_status.stalled(policy.generation, None, now))
        if key in self._stalls:
            conditions.append(progress.condition(policy, self._stalls[key], now))
        conditions += [
            troubles.condition(policy, kind, self._troubles[key, kind], now)
            for kind in TroubleKind
            if (key, kind) in self._troubles
        ]
        # While a workload restarts it has no pods. Then the condition stays.
        if worst is not None or not forecasts:
            conditions.append(policy_status.fit(policy, worst, now))
        return CheckpointPolicyStatus(
            observed_generation=policy.generation,
            workloads=PolicyWorkloads(count=len(workloads), names=[item.name for item in workloads[:50]]),
            conditions=policy_status.joined_conditions(conditions, before),
            forecasts=forecasts,
            goodput=self.goodput.entries(policy, workloads, forecasts),
            last_save=policy_status.last_save(epochs, policy.status.last_save),
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
