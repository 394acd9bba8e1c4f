"""Records how many pods of the gangs are connected, and posts an Event on a gang whose pods stay away.

One task on the controller's event loop looks twice a minute: it counts the pods that run and those that are connected
to this replica, joins the numbers of the other replicas, which the watch brings with the policies, and hands the result
to ``PolicyWriter``. It writes this replica's numbers if they changed. ``close`` takes them back. Each look also renews
this replica's Lease, which says that its numbers still count (``ReplicaLease``).

While the API server does not answer, the other replicas' numbers are old, so nothing is judged. The API server may also
refuse writes to some policies only, for example while an admission webhook is down. A replica that cannot write into a
policy does not judge that policy, and continues with the others. A replica that has nothing to write there does not
notice, and may count the pods of other replicas as missing. A replica that cannot renew its Lease judges nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_conditions
from gracepoint_operator.decisions.policy_conditions import GangConnection
from gracepoint_operator.kube import client
from gracepoint_operator.kube.write_queue import Key
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.recording.replica_lease import ReplicaLease
from gracepoint_operator.resources import CheckpointPolicy, PolicyReplica

logger = logging.getLogger(__name__)

EVERY_S = 30.0
#: So many pods are counted in one turn of the event loop: 2 to 4 ms.
_PODS_A_TURN = 1_000
_RETRIES_S = 20.0
#: If the writes took longer, pods are counted again before it is judged which are missing.
_COUNT_AGAIN_S = 5.0
_NOT_RECORDED = "connections not recorded, trying again"


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
        self._recorded: set[Key] = set()  # policies whose status has numbers of this replica
        self._unwritten: dict[Key, client.Unavailable] = {}  # policies whose newest write failed; longest tried first
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
            began_at, counted = self._clock(), await self._counted()
            await self._write_all(counted)
            self._policy_writer.write_moved()
            if self._lease.sees_others(policy_conditions.RENEWED_S):
                took_long = self._clock() - began_at > _COUNT_AGAIN_S
                await self._judge(await self._counted() if took_long else counted)
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
                logger.warning("the replica's Lease is not renewed, trying again", extra=about(error=str(error)))
            self._unrenewed = str(error)

    async def _write_all(self, counted: _PodCounts) -> None:
        """Writes this replica's numbers into each policy. Those that could not be written last time come last.

        Each of them may take as long as a request may. The time for all of them is limited, and the rest has its turn
        in the next round, so that the numbers in the others do not become too old meanwhile.
        """
        postponed: dict[Key, client.Unavailable] = {}
        unwritten: dict[Key, client.Unavailable] = {}
        begun_at = self._clock()
        for key in self._in_turn():
            await asyncio.sleep(0)  # a notice does not wait for all policies
            policy = self._cache.policies.get(key)
            if policy is None:
                continue
            if key in self._unwritten and self._clock() - begun_at > _RETRIES_S:
                postponed[key] = self._unwritten[key]
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
            logger.warning(_NOT_RECORDED, extra=about(policy="/".join(key), more=more, error=str(unwritten[key])))
        self._unwritten = postponed | unwritten

    def _in_turn(self) -> list[Key]:
        policies = set(self._cache.policies)
        return [*sorted(policies - self._unwritten.keys()), *(key for key in self._unwritten if key in policies)]

    async def _judge(self, counted: _PodCounts) -> None:
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
        for by_workload in (self._missing_since, self._told):
            for uid in by_workload.keys() - self._cache.objects.workloads.keys():
                del by_workload[uid]

    def _uids(self, key: Key) -> list[str]:
        """UIDs of the known workloads of a policy."""
        return sorted(self._cache.objects.workloads_with_policy(key) & self._cache.objects.workloads.keys())

    @staticmethod
    def _own(uids: list[str], counted: _PodCounts) -> dict[str, dict[str, int]]:
        """How many pods are connected here, by workload and, if several replicatedJobs train, by their names."""
        connected = {}
        for uid in uids:
            if here := counted.connected.get(uid):
                several = len(counted.running[uid]) > 1
                connected[uid] = dict(here) if several else {"": here.total()}
        return connected

    async def _counted(self) -> _PodCounts:
        """Counts pods of the current attempts, in many turns of the event loop: a notice does not wait for all pods."""
        here, now = set(self._connected()), self._clock()
        counted = _PodCounts()
        workloads, before = self._cache.objects.workloads, self._running_since
        running_since: dict[str, float] = {}
        for number, pod in enumerate(list(self._cache.objects.pods.values()), start=1):
            if number % _PODS_A_TURN == 0:
                await asyncio.sleep(0)
            if pod.phase != "Running" or pod.deletion_at is not None or not pod.policy or pod.helps:
                continue
            workload = workloads.get(pod.workload_uid)
            if workload is None or workload.finished or workload.deleted or not workload.injected:
                continue
            if pod.restart_attempt == workload.restarts and pod.namespace == workload.namespace:
                since = running_since[pod.uid] = before.get(pod.uid, now)
                counted.running[workload.uid][pod.replicated_job] += 1
                counted.young[workload.uid] += now - since < policy_conditions.GRACE_S
                counted.connected[workload.uid][pod.replicated_job] += pod.uid in here
        self._running_since = running_since
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

    async def _apply(self, key: Key, entry: PolicyReplica) -> None:
        try:
            await self._policy_writer.write_own_entry(key, entry)
            self._recorded.add(key)
        except client.NotFound:
            return
        except client.Unavailable:
            raise
        except client.KubeError as error:
            logger.warning(_NOT_RECORDED, extra=about(policy="/".join(key), error=str(error)))

    async def _post(self, gang: GangConnection) -> None:
        uid, noted_attempt = gang.workload.uid, self._told.get(gang.workload.uid)
        if gang.late and noted_attempt != gang.attempt:
            self._told[uid] = gang.attempt
            logger.warning(
                "pods of a gang are not connected",
                extra=about(workload=gang.workload.name, connected=gang.connected, expected=gang.expected),
            )
        elif noted_attempt is not None and not gang.late and gang.connected >= gang.expected:
            del self._told[uid]
        else:
            return
        await self._events.post_on(gang.workload, policy_conditions.connection_note(gang), f"{gang.attempt}")
