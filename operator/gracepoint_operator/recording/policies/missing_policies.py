"""Says which workloads name a policy that does not exist: in Events on them, in the log and in a metric.

One task on the controller's event loop looks twice a minute. A policy counts as missing if it is not there at two
looks: GitOps tools replace objects by deleting and creating them, and the end of a namespace takes its policies along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.statuses.event_notes import Note
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.workloads import Workload

log = logging.getLogger(__name__)

EVERY_S = 30.0
REASON_MISSING = "PolicyMissing"
REASON_FOUND = "PolicyFound"


class MissingPolicies:
    """See the module.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Shows how many workloads are concerned.
        clock: Seconds since the epoch.
        replica: This replica's name.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, metrics: Metrics, clock: Callable[[], float], replica: str
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._events = EventRecorder(api, clock, replica)
        self._uids: dict[Key, str] = {}  # policy -> its UID when it was last seen
        self._missing: dict[str, str] = {}  # UID of the workload -> the policy that it lacked at the last look
        self._told: dict[str, str] = {}  # UID of the workload -> the policy of which an Event says that it is missing

    async def look(self) -> None:
        """Looks once, and says what has changed. To be called every ``EVERY_S``."""
        known, workloads = self._cache.policies, self._cache.objects.workloads
        self._uids |= {key: policy.uid for key in known if (policy := known.get(key)) is not None}
        named = self._cache.objects.named_policies()
        self._uids = {key: uid for key, uid in self._uids.items() if key in known or key in named}
        unreadable = self._cache.unreadable_policies()

        def is_there(workload: Workload) -> bool:
            key = (workload.namespace, workload.policy)
            return key in unreadable or known.get(key) is not None

        lacking = {
            uid: workload.policy
            for uid, workload in workloads.items()
            if workload.policy and not (workload.finished or workload.deleted) and not is_there(workload)
        }
        missing = {uid for uid, policy in lacking.items() if self._missing.get(uid) == policy}
        self._missing = lacking
        self._metrics.workloads_without_policy.set(len(missing))
        for uid in missing:
            if self._told.get(uid) != workloads[uid].policy:
                self._told[uid] = workloads[uid].policy
                await self._say_missing(workloads[uid])
        for uid in list(self._told):
            workload = workloads.get(uid)
            if workload is None or is_there(workload):
                del self._told[uid]
                if workload is not None and not (workload.finished or workload.deleted):
                    await self._say_found(workload)

    async def _say_missing(self, workload: Workload) -> None:
        log.warning(
            "a workload names a policy that does not exist",
            extra=about(workload=f"{workload.namespace}/{workload.name}", policy=workload.policy),
        )
        if self._cache.policy_of(workload) is not None:
            said = "The settings that it was created with go on to apply"
        else:
            said = "It was created without the settings that would go on to apply, so no disruption is announced to it"
        note = Note(
            REASON_MISSING,
            f"the CheckpointPolicy {workload.policy} does not exist. {said}; new workloads that name it are refused. "
            "Create it again, or correct the label",
            warning=True,
        )
        await self._events.post_on(workload, note, self._episode(workload))

    async def _say_found(self, workload: Workload) -> None:
        note = Note(REASON_FOUND, f"the CheckpointPolicy {workload.policy} exists again, and applies")
        await self._events.post_on(workload, note, self._episode(workload))

    def _episode(self, workload: Workload) -> str:
        """The same in all replicas that have seen the policy: which one of that name is missing, or is there again."""
        return f"{workload.policy} {self._uids.get((workload.namespace, workload.policy), '')}"
