"""Writes policies' statuses to the API: conditions, who names the policy, and what the gangs forecast.

Runs as tasks of a scribe on the core's event loop. Each write reads the policy, joins it with what is known
here and writes the outcome under the version that was read, so that both replicas come to say the same.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from gracepoint.wire.messages import Forecast
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_status
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicyStatus,
    Condition,
    PolicyWorkloads,
    WorkloadForecast,
)


class PolicyWriter:
    """Keeps the policies' statuses up to what this replica knows.

    Args:
        api: The API server.
        world: What is known of the cluster and its epochs.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Pause between two writes of one policy.
    """

    def __init__(
        self, api: KubeClient, world: ClusterCache, metrics: Metrics, clock: Callable[[], float], interval_s: float
    ) -> None:
        self._api = api
        self._world = world
        self._clock = clock
        self._forecasts: dict[str, WorkloadForecast] = {}  # JobSet UID -> newest that came to this replica
        self._scribe = WriteQueue("policy", self._write, metrics, interval_s)

    def touch(self, namespace: str, name: str) -> None:
        """Something that a policy's status is made of is new."""
        if (namespace, name) in self._world.policies:
            self._scribe.touch((namespace, name))

    def forecast(self, forecast: Forecast) -> None:
        """A gang's newest prediction of an emergency.

        Raises:
            pydantic.ValidationError: Its figures cannot be.
        """
        workload = self._world.workloads.get(forecast.workload_uid)
        if workload is not None:
            self._forecasts[workload.uid] = WorkloadForecast(
                name=workload.name,
                uid=workload.uid,
                drain_seconds=round(forecast.drain_s, 3),
                save_seconds=round(forecast.save_s, 3),
                margin=forecast.margin,
                time=datetime.datetime.fromtimestamp(self._clock(), datetime.UTC),
            )
            self.touch(workload.namespace, workload.policy)

    def forget(self, workload_uid: str) -> None:
        """The JobSet is gone."""
        self._forecasts.pop(workload_uid, None)

    async def close(self, timeout_s: float) -> None:
        await self._scribe.close(timeout_s)

    async def _write(self, key: Key) -> None:
        namespace, name = key
        if key not in self._world.policies:
            return
        try:
            body = await self._api.get(kinds.POLICIES, namespace, name)
        except client.NotFound:
            return
        policy = CheckpointPolicy.of(body)
        wanted = self._status(policy)
        changes = wanted.changes_since(policy.status)
        if changes:
            version = body["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "status": changes}
            await self._api.merge_status(kinds.POLICIES, namespace, name, patch)

    def _status(self, policy: CheckpointPolicy) -> CheckpointPolicyStatus:
        now = self._clock()
        key = (policy.namespace, policy.name)
        workloads = sorted(
            (item for item in self._world.workloads.values() if (item.namespace, item.policy) == key),
            key=lambda item: item.name,
        )
        forecasts = policy_status.newest_forecasts(
            self._forecasts.values(), policy.status.forecasts or (), {item.uid for item in workloads}
        )
        granted: list[tuple[WorkloadForecast, float]] = []
        for forecast in forecasts:
            gang = self._world.gang(forecast.uid)
            grace_s = policy_status.grace_s(gang.members, gang.nodes)
            if grace_s is not None:
                granted.append((forecast, grace_s))
        worst = min(granted, key=lambda item: item[1] - policy_status.needed_s(item[0]), default=None)
        before = policy.status.conditions or []
        conditions: list[Condition] = [
            policy_status.readiness(policy, now),
            policy_status.injection(policy, workloads, now),
        ]
        # Between two lives of a job it has no pods: then the condition stays.
        if worst is not None or not forecasts:
            conditions.append(policy_status.fit(policy, worst, now))
        epochs = [epoch for epoch in self._world.epochs.values() if (epoch.namespace, epoch.spec.policy.name) == key]
        return CheckpointPolicyStatus(
            observed_generation=policy.generation,
            workloads=PolicyWorkloads(count=len(workloads), names=[item.name for item in workloads[:50]]),
            conditions=policy_status.joined_conditions(conditions, before),
            forecasts=forecasts,
            last_save=policy_status.last_save(epochs, policy.status.last_save),
        )
